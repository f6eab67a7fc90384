H=$1
T0=$SECONDS
( export OMP_NUM_THREADS=1; timeout 130 python3 -m flashtile.bench_mark.bench_mark_flash_attention --preset performance24 --providers flashtile flashtile_triton fa2 cudnn fa3 --seconds 110 --commit $H --out $OUT/h200_performance24.json > $OUT/perf.txt 2>&1 )
echo perf24 $((SECONDS-T0)); grep -E "^bf16|shapes" $OUT/perf.txt | cut -c1-150; T0=$SECONDS
timeout 40 python3 -m flashtile.bench_mark.bench_mark_llama --commit $H --out $OUT/h200_llama.json > $OUT/llama.txt 2>&1; echo llama $((SECONDS-T0)); tail -15 $OUT/llama.txt; T0=$SECONDS
timeout 170 python3 -c "from flashtile.cli import main; main(['compare','flash','sdpa','naive','flash_triton','--steps','100','--out-dir','$OUT/cmp'])" > $OUT/compare.txt 2>&1; echo compare $((SECONDS-T0)); tail -25 $OUT/compare.txt; ls $OUT/cmp; (cd $OUT && tar czf cmp.tgz cmp && rm -rf cmp)
