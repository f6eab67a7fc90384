import time, torch, cProfile, pstats, io
from flashtile import flash_attention, flash_attention_varlen
q,k,v=(torch.randn(32,16,512,128,device="cuda",dtype=torch.bfloat16) for _ in range(3))
a,b,c=(torch.randn(16384,16,128,device="cuda",dtype=torch.bfloat16) for _ in range(3))
cu=torch.arange(0,16385,1024,device="cuda",dtype=torch.int32)
F={"dense":lambda: flash_attention(q,k,v,is_causal=True),"packed":lambda: flash_attention_varlen(a,b,c,cu,cu,is_causal=True)}
for name,f in F.items():
    with torch.no_grad():
        for _ in range(20): f()
        torch.cuda.synchronize()
        t=time.perf_counter()
        for _ in range(30): f()
        h=(time.perf_counter()-t)/30*1e6; torch.cuda.synchronize()
        p=cProfile.Profile(); p.enable()
        for _ in range(100): f()
        p.disable(); torch.cuda.synchronize()
        s=io.StringIO(); pstats.Stats(p,stream=s).sort_stats("tottime").print_stats(16)
        print(name,"host us per call",round(h,1)); print("\n".join(l[:110] for l in s.getvalue().splitlines()[6:] if l.strip()))
