"""Warp-level model of the wide d256 backward: every warp an actor; wgmma, TMA, unfenced stores are asynchronous."""
import random, sys, itertools
from collections import Counter, defaultdict
class Bad(Exception): pass
Q_FREE,DO_FREE,DS,P_READY,P_READ,DQ=6,8,10,12,13,14
NEED={6:9,7:9,8:9,10:8,11:8,12:8,13:8,14:5,15:5,0:4,2:4}
class M:
    def __init__(s,seed,walks,stages=2,parts=(2,2),turns=False,writer_fence=True,tri_bars=True,mut=None,ds_fence=True):
        s.r=random.Random(seed); s.walks=walks; s.st=stages; s.parts=parts; s.turns=turns; s.wf=writer_fence; s.tri=tri_bars; s.mut=mut; s.dsf=ds_fence
        s.gen={}; s.asy={}; s.open=defaultdict(list); s.pend=defaultdict(list) # pend[warp]=[(place,tag)]
        s.nb=defaultdict(set); s.nbgen=Counter(); s.mb=Counter(); s.mbc=Counter(); s.need={}
        s.wg=defaultdict(list); s.loads=[]; s.tma=defaultdict(list); s.out=Counter(); s.read_done=Counter()
        s.board={}; s.tile={}; s.pos=-1
    # memory
    def wr(s,w,place,tag):
        if s.open[place]: raise Bad(f'{w} writes {place}:={tag} while {s.open[place]} read it')
        s.gen[place]=tag; s.pend[w].append((place,tag))
    def land1(s,w):
        place,tag=s.pend[w].pop(0)
        if s.open[place]: raise Bad(f'store {tag} of {w} lands in {place} while {s.open[place]} read it')
        s.asy[place]=tag
    def fence(s,w):
        while s.pend[w]: s.land1(w)
    def rd(s,w,place,tag):
        if s.gen.get(place)!=tag: raise Bad(f'{w} reads {place}: {s.gen.get(place)} wanted {tag}')
    def aopen(s,w,place,tag):
        if tag is not None and s.asy.get(place)!=tag: raise Bad(f'async of {w} reads {place}: {s.asy.get(place)} wanted {tag}')
        if tag is not None: s.open[place].append((w,tag))
    def aclose(s,w,place,tag):
        if tag is not None:
            if s.asy.get(place)!=tag: raise Bad('changed')
            s.open[place].remove((w,tag))
    # sync
    def arr(s,w,n):
        if w in s.nb[n]: raise Bad(f'{w} twice at barrier {n}')
        s.nb[n].add(w)
        if len(s.nb[n])>NEED[n]: raise Bad('too many')
        if len(s.nb[n])==NEED[n]: s.nb[n]=set(); s.nbgen[n]+=1
    def syn(s,w,n):
        g=s.nbgen[n]; s.arr(w,n)
        while s.nbgen[n]==g: yield
    def marr(s,b,count=1):
        s.mbc[b]+=1
        if s.mbc[b]==count: s.mbc[b]=0; s.mb[b]+=1
    def mw(s,b,k):
        """wait for completion number k (from 0); k=-1: passes at once. Parity only, as the hardware."""
        while s.mb[b]%2==(k&1): yield
        if s.mb[b]!=k+1: raise Bad(f'mbarrier {b} passed at phase {s.mb[b]} wanted {k+1}')
    # async
    def mma(s,w,reads): s.wg[w].append([0,reads])
    def wait(s,w,n):
        while len(s.wg[w])>n: yield
    def step_async(s):
        c=[]
        c+=[('wg',w) for w,q in s.wg.items() if q]; c+=[('st',w) for w,q in s.pend.items() if q]
        c+=[('ld',i) for i in range(len(s.loads))]; c+=[('tma',w) for w,q in s.tma.items() if q]
        if not c: return False
        k,w=s.r.choice(c)
        if k=='wg':
            g=s.wg[w][0]
            if g[0]==0:
                for p,t in g[1]: s.aopen(w,p,t)
                g[0]=1
            else:
                for p,t in g[1]: s.aclose(w,p,t)
                s.wg[w].pop(0)
        elif k=='st': s.land1(w)
        elif k=='ld':
            b,ps=s.loads.pop(w)
            for p,t in ps:
                if s.open[p]: raise Bad(f'load lands in {p} while read by {s.open[p]}')
                s.gen[p]=s.asy[p]=t
            s.marr(b)
        else:
            q=s.tma[w]; i=s.r.randrange(len(q)); g=q[i]
            if g[0]==0:
                for p,t in g[1]: s.aopen(w,p,t)
                g[0]=1
            else:
                for p,t in g[1]: s.aclose(w,p,t)
                q.pop(i); s.out[tuple(t for p,t in g[1])]+=1
        return True
    def load(s,b,ps):
        for p,_ in ps:
            if s.open[p]: raise Bad(f'load into {p} while read by {s.open[p]}')
            s.gen[p]=s.asy[p]='on its way'
        s.loads.append((b,ps))
W4=range(4)
def q4(name,tag): return [((*name,i),(tag,i) if tag is not None else None) for i in W4]
def loader(m):
    it=0; w='L'
    for n,tot in enumerate(m.walks+[-1]):
        if n>=2: yield from m.mw(('read',n%2),n//2-1)
        m.wr(w,('board',n%2),(n,tot)); yield
        m.marr(('posted',n%2))
        if tot==-1: break
        def kv():
            if n: yield from m.mw('vfree',n-1)
            m.load('v',[(('v',),n)]); yield
            if n: yield from m.mw('kfree',n-1)
            m.load('k',[(('k',),n)]); yield
        if tot==0: yield from kv()
        for i in range(tot):
            if it>=m.st: yield from m.syn(w,Q_FREE+it%m.st)
            m.wr(w,('tile',it%m.st),(n,i)); m.load(('q',it%m.st),[(('q',it%m.st),(n,i)),(('lse',it%m.st),(n,i))]); yield
            if it>=1: yield from m.syn(w,DO_FREE)
            m.load(('do',0),[(('do',),(n,i)),(('delta',),(n,i))]); yield
            if i==0: yield from kv()
            it+=1
    for i in range(max(it-m.st,0),it): yield from m.syn(w,Q_FREE+i%m.st)
    for i in range(max(it-1,0),it): yield from m.syn(w,DO_FREE)
def total(m,w,n):
    yield from m.mw(('posted',n%2),n//2)
    b=m.gen[('board',n%2)]
    if b[0]!=n: raise Bad('board')
    return b[1]
def done(m,w,n): m.rd(w,('board',n%2),(n,m.walks[n])); m.marr(('read',n%2),4)
def wbar(m,w):
    yield from m.syn(w,0 if w[0]=='p' else 2)
def store_dq(m,c,w,i,tag,number):
    if m.mut!='nofree': yield from m.mw(('dqf',c),number-1)
    for piece in range(2):
        m.wr(w,('dq',c,w[1],piece),(tag,w[1])); yield
    if m.wf: m.fence(w)
    m.arr(w,DQ+c)
def reducer(m,c):
    w=f'R{c}'; n=0
    while (tot:=(yield from total(m,w,n)))>=0:
        for i in range(tot if m.parts[c] else 0):
            if m.turns:
                for _ in range(m.r.choice((0,0,50,400,2000))): yield
            for part in range(m.parts[c]):
                yield from m.syn(w,DQ+c)
                if not m.wf: m.fence(w)   # the reducer's own fence: of its own stores only
                for box in range(2): m.tma[w].append([0,[(('dq',c,i_,box),((n,i,part),i_)) for i_ in W4]]); yield
                while m.tma[w]: yield
                m.marr(('dqf',c)); yield
        done(m,w,n); n+=1
def pcons(m,x):
    w=('p',x); it=n=0; P=m.parts[0]
    while (tot:=(yield from total(m,w,n)))>=0:
        yield from m.mw('k',n)
        for i in range(tot):
            par=it&1; b=it%m.st; old=(n,i-1) if i else None
            if m.tri: yield from wbar(m,w)
            yield from m.mw(('q',b),it//m.st)
            m.mma(w,[(('k',),n),(('q',b),(n,i))]); yield
            yield from m.syn(w,DS+(par^1))
            if P: m.mma(w,[(('k',),n)]+q4(('ds',par^1),old))
            m.rd(w,('tile',b),(n,i)); m.rd(w,('lse',b),(n,i)); yield
            yield from m.wait(w,1 if P else 0)
            m.rd(w,('board',n%2),(n,tot)); m.arr(w,Q_FREE+b); yield
            if P:
                yield from m.wait(w,0)
                if i: yield from store_dq(m,0,w,i,(n,i-1,0),(it-1)*P)
            if m.mut!='noPREAD': yield from m.syn(w,P_READ)
            m.wr(w,('P',x),((n,i),x)); yield
            m.arr(w,P_READY)
            yield from m.mw(('do',0),it)
            if P>1: m.mma(w,[(('k',),n)]+q4(('ds',par^1),old)); yield
            m.mma(w,[(('do',),(n,i))]); yield
            if P>1:
                yield from m.wait(w,1)
                if i:
                    if m.tri: yield from wbar(m,w)
                    yield from store_dq(m,0,w,i,(n,i-1,1),(it-1)*P+1)
            yield from m.wait(w,0)
            m.arr(w,DO_FREE); it+=1
        if tot>0:
            yield from m.syn(w,DS+((it-1)&1)); yield from m.syn(w,P_READ)
            yield from last(m,w,0,n,tot,it)
        yield from m.syn(w,P_READY)
        yield from wbar(m,w)
        if x==0: m.marr('kfree',2)
        yield from m.mw('v',n)
        m.wr(w,('vout',x),('dv',n)) if False else None
        if m.open[('v',)]: raise Bad('dV over V')
        m.gen[('v',)]=m.asy[('v',)]=('dv',n); yield
        yield from wbar(m,w)
        if x==0: m.tma['po'].append([0,[(('v',),('dv',n))]])
        yield from wbar(m,w)
        if x==0:
            done(m,w,n)
            while m.tma['po']: yield
        yield from wbar(m,w)
        if x==0: m.marr('vfree',2)
        n+=1
def last(m,w,c,n,tot,it):
    for part in range(m.parts[c]):
        m.mma(w,[(('k',),n)]+q4(('ds',(it-1)&1),(n,tot-1))); yield
        yield from m.wait(w,0)
        if m.tri: yield from wbar(m,w)
        yield from store_dq(m,c,w,tot,(n,tot-1,part),(it-1)*m.parts[c]+part)
def dcons(m,x):
    w=('d',x); it=n=0; P=m.parts[1]
    while (tot:=(yield from total(m,w,n)))>=0:
        if tot>0: m.arr(w,DS+((it&1)^1)); m.arr(w,P_READ)
        yield from m.mw('k',n); yield from m.mw('v',n)
        for i in range(tot):
            par=it&1; b=it%m.st; old=(n,i-1) if i else None
            yield from m.mw(('do',0),it)
            m.mma(w,[(('v',),n),(('do',),(n,i))]); yield
            m.mma(w,[(('k',),n)]+q4(('ds',par^1),old)); yield
            m.rd(w,('delta',),(n,i))
            yield from m.wait(w,1)
            m.arr(w,DO_FREE)
            if m.mut!='noPREADY': yield from m.syn(w,P_READY)
            for j in W4: m.rd(w,('P',j),((n,i),j)); 
            yield
            m.arr(w,P_READ)
            if m.tri: yield from wbar(m,w)
            m.wr(w,('ds',par,x),((n,i),x)); yield
            if m.dsf: m.fence(w)
            m.arr(w,DS+par)
            if m.mut!='nobar': yield from wbar(m,w)
            yield from m.wait(w,0)
            if i: yield from store_dq(m,1,w,i,(n,i-1,0),(it-1)*P)
            yield from m.mw(('q',b),it//m.st)
            if P>1: m.mma(w,[(('k',),n)]+q4(('ds',par^1),old)); yield
            m.mma(w,[(('q',b),(n,i))]); yield
            if P>1:
                yield from m.wait(w,1)
                if i:
                    if m.tri: yield from wbar(m,w)
                    yield from store_dq(m,1,w,i,(n,i-1,1),(it-1)*P+1)
            yield from m.wait(w,0)
            m.arr(w,Q_FREE+b); it+=1
        if tot>0: yield from last(m,w,1,n,tot,it)
        yield from m.syn(w,P_READY)
        yield from wbar(m,w)
        if x==0: m.marr('vfree',2)
        if m.open[('k',)]: raise Bad(f'dK over K, read by {m.open[("k",)]}')
        m.gen[('k',)]=m.asy[('k',)]=('dk',n); yield
        yield from wbar(m,w)
        if x==0: m.tma['do'].append([0,[(('k',),('dk',n))]])
        yield from wbar(m,w)
        if x==0:
            done(m,w,n)
            while m.tma['do']: yield
        yield from wbar(m,w)
        if x==0: m.marr('kfree',2)
        n+=1
def run(seed,**kw):
    r=random.Random(seed*7+1)
    walks=[r.choice((0,1,1,2,3,4,5,7)) for _ in range(r.randint(1,5))]
    m=M(seed,walks,**kw)
    acts={'L':loader(m),'R0':reducer(m,0),'R1':reducer(m,1)}
    for x in W4: acts['p',x]=pcons(m,x); acts['d',x]=dcons(m,x)
    haste={a:r.choice((1,1,3,10,40)) for a in acts}
    pa=r.choice((0.02,0.1,0.3,0.7)); idle=0
    slow=None
    while acts:
        if r.random()<0.002: # adversary: freeze or favour someone
            haste[r.choice(list(haste))]=r.choice((0.02,1,10,60))
        if r.random()<pa: 
            if m.step_async(): idle=0
        names=list(acts); a=r.choices(names,[haste[k] for k in names])[0]
        try: next(acts[a])
        except StopIteration: del acts[a]; idle=0
        idle+=1
        if idle>400000: raise Bad(f'stuck {list(acts)}')
    while m.step_async(): pass
    if any(m.nb.values()): raise Bad(f'left over {dict(m.nb)}')
    want=sum(walks)*sum(m.parts)*2+2*len(walks)
    if sum(m.out.values())!=want: raise Bad('count')
if __name__=='__main__':
    import time
    kw=eval('dict('+sys.argv[1]+')'); lim=float(sys.argv[2]); t=time.time(); bad=Counter(); n=0; seed=int(sys.argv[3]) if len(sys.argv)>3 else 0
    while time.time()-t<lim:
        try: run(seed,**kw)
        except Bad as e: bad[str(e)[:110]]+=1
        seed+=1; n+=1
    print(kw,n,'runs;',sum(bad.values()),'bad'); [print('   ',c,b) for b,c in bad.most_common(3)]
