import sys,re,subprocess
import pathlib, triton; B=str(pathlib.Path(triton.__file__).parent / 'backends/nvidia/bin') + '/'
out=subprocess.run([B+'nvdisasm','-c','-hex',sys.argv[1]],capture_output=True,text=True).stdout.splitlines()
i=0;n=0
while i<len(out):
    l=out[i]
    m=re.match(r'\s*/\*([0-9a-f]+)\*/\s+(.*?;?)\s*/\* (0x[0-9a-f]+) \*/',l)
    if m:
        lo=int(m[3],16); m2=re.search(r'/\* (0x[0-9a-f]+) \*/',out[i+1]); hi=int(m2[1],16); i+=1
        v=(hi<<64)|lo
        c=(v>>105)&((1<<21)-1)
        stall=c&15; y=(c>>4)&1; wb=(c>>5)&7; rb=(c>>8)&7; wm=(c>>11)&63
        print(f"{m[1]} [B{''.join(str(k) if wm>>k&1 else '-' for k in range(6))} R{rb if rb!=7 else '-'} W{wb if wb!=7 else '-'} {'Y' if not y else '-'} S{stall:02d}] {re.sub(' +',' ',m[2])}")
    elif re.match(r'\.L',l): print(l)
    i+=1
