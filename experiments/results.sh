# results.sh COMMIT [parts]: each part prints its seconds; at most 8 files come back, so logs go into one archive of small files
H=$1; shift; PARTS=${@:-perf compare llama both features serving heavy perf2}
export OMP_NUM_THREADS=1; L=/tmp/logs; mkdir -p $L
B="python3 -m flashtile.bench_mark"
for part in $PARTS; do T0=$SECONDS; case $part in
 tier) ( export PYTHONPATH=/tmp/site:src:.:experiments INSTANT=$OUT/instant.txt; timeout 520 python3 -m pytest -o addopts= -v -rf -m gpu tests -n 15 -p no:benchmark -p instant --tb=short --show-capture=no > $OUT/tier.txt 2>&1 ); tail -3 $OUT/tier.txt; grep -aE "^FAILED|^ERROR" $OUT/tier.txt | cut -c1-200 | head -30;;
 perf) timeout 150 $B.bench_mark_flash_attention --preset performance24 --providers flashtile flashtile_triton fa2 cudnn fa3 --seconds 135 --commit $H --out $OUT/h200_hopper.json > $L/perf.txt 2>&1; grep -E "shapes" $L/perf.txt | cut -c1-150;;
 perf2) timeout 120 $B.bench_mark_flash_attention --preset performance24 --providers flashtile cudnn fa3 --seconds 105 --commit $H --out $OUT/h200_hopper_again.json > $L/perf2.txt 2>&1; grep -E "shapes" $L/perf2.txt | cut -c1-150;;
 compare) ( unset OMP_NUM_THREADS; timeout 260 python3 -c "from flashtile.cli import main; main(['compare','flash','sdpa','flash_triton','naive','--steps','200','--commit','$H','--out-dir','/tmp/cmp'])" > $L/compare.txt 2>&1; tail -6 $L/compare.txt | cut -c1-150; cp /tmp/cmp/comparison.json $OUT );;
 long) ( unset OMP_NUM_THREADS; timeout 200 python3 -c "from flashtile.cli import main; main(['compare','flash','sdpa','flash_triton','--steps','100','--context','8192','--compile','--commit','$H','--out-dir','/tmp/cmpl'])" > $L/long.txt 2>&1; tail -6 $L/long.txt | cut -c1-150; cp /tmp/cmpl/comparison.json $OUT/long.json );;
 llama) timeout 40 $B.bench_mark_llama --commit $H --out $OUT/h200_llama.json > $L/llama.txt 2>&1;;
 both) timeout 95 $B.bench_mark_flash_attention --preset performance24 --modes both deterministic --providers flashtile fa2 cudnn --seconds 80 --commit $H --out $OUT/h200_both.json > $L/both.txt 2>&1; grep -E "shapes" $L/both.txt | cut -c1-150;;
 features) timeout 100 $B.bench_mark_features --groups plain window documents softcap alibi bias --seconds 88 --processes 14 --compiles --commit $H --out $OUT/h200_features.json > $L/features.txt 2>&1; tail -40 $L/features.txt | cut -c1-110;;
 serving) timeout 60 $B.bench_mark_flash_attention --preset serving --providers flashtile fa2 cudnn fa3 --seconds 50 --commit $H --out $OUT/h200_serving.json > $L/serving.txt 2>&1; tail -12 $L/serving.txt | cut -c1-150;;
 heavy) timeout 70 $B.bench_mark_flash_attention --preset performance24 --modes forward --inputs heavy --providers flashtile cudnn fa3 --seconds 55 --commit $H --out $OUT/h200_heavy.json > $L/heavy.txt 2>&1; grep -E "shapes" $L/heavy.txt | cut -c1-190;;
 overhead) timeout 70 $B.bench_mark_overhead --commit $H --out $OUT/h200_overhead.json > $L/overhead.txt 2>&1; tail -20 $L/overhead.txt | cut -c1-120;;
 esac; echo "== $part $((SECONDS-T0)) s"; done; (cd $L && tar czf $OUT/logs.tgz *.txt); ls $OUT
