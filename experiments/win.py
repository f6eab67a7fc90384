import statistics, torch
from flashtile import mask
from flashtile.kernel import launch
from flashtile.kernel.hopper import forward as F
from flashtile.kernel.hopper.forward_sizes import two_consumers
def ev(fn, n=40):
    for _ in range(5): fn()
    out=[]
    for _ in range(n):
        a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record(); fn(); b.record(); b.synchronize(); out.append(a.elapsed_time(b))
    return statistics.median(out)
d=64; H=32
c3=launch.lookup_hopper("hopper_forward",64,64,torch.bfloat16); c2=two_consumers(c3)
for n in (4096,16384):
    q,k,v=(torch.randn(16384//n,H,n,d,device="cuda",dtype=torch.bfloat16) for _ in range(3))
    for w in (128,256,512,1024,2048,4096):
        if w>=n: continue
        m=mask.window(w,0); r={}
        for _ in range(3):
            for name,c in (("three",c3),("two",c2)):
                r.setdefault(name,[]).append(ev(lambda: F.forward(q,k,v,softmax_scale=.125,mask=m,config=c)))
        print("window",n,w,{k:round(statistics.median(x),4) for k,x in r.items()}, round(statistics.median(r["three"])/statistics.median(r["two"]),3),flush=True)
