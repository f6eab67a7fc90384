export OMP_NUM_THREADS=1
T0=$SECONDS
PYTHONPATH=$PYTHONPATH:.gpu timeout 150 python3 experiments/finals.py --suite '{"64": "base unseen quick unseen+quick poly4 poly2 noturn expwait hot64", "128": "base draw6 early", "256": "base early draw6"}' --lengths 512,2048,16384 --out $OUT/finals.json --passes 5 --ms 10
echo finals $((SECONDS-T0)); T0=$SECONDS
M=sm__cycles_active.avg,sm__cycles_active.max,sm__cycles_elapsed.max,gpc__cycles_elapsed.avg.per_second,gpu__time_duration.sum,sm__inst_issued.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active,sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active,l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed,l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed,lts__t_sector_hit_rate.pct,dram__bytes_read.sum,sm__inst_executed.sum
for k in gmio_throttle barrier dispatch_stall gmma math_pipe_throttle mio_throttle no_instruction not_selected selected short_scoreboard long_scoreboard wait sleeping membar branch_resolve; do M=$M,smsp__average_warps_issue_stalled_${k}_per_issue_active.ratio; done
for who in ours fa3; do
PYTHONPATH=$PYTHONPATH:.gpu timeout 60 ncu --clock-control none --cache-control none --csv --metrics $M -k regex:"forward_kernel|device_kernel" python3 experiments/one.py $who > $OUT/ncu_$who.csv 2>&1
done
echo ncu $((SECONDS-T0)); tail -2 $OUT/ncu_ours.csv | cut -c1-300
