export OMP_NUM_THREADS=1
T0=$SECONDS
( export PYTHONPATH=/tmp/site:src:.:.gpu INSTANT=$OUT/instant.txt; timeout 440 python3 -m pytest -o addopts= -v -rf -m gpu tests -n 15 -p no:benchmark -p instant --tb=short --show-capture=no > $OUT/tier.txt 2>&1 )
echo tier $((SECONDS-T0)); tail -3 $OUT/tier.txt; grep -aE "^FAILED|^ERROR" $OUT/tier.txt | cut -c1-200 | head -30
