"""For racecheck: numbers handed from warp to warp by an mbarrier, as right as can be; and without the wait, as wrong as can be."""
import sys, torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

@gluon.jit
def _writer(board, bars, n):
    for i in range(n):
        if i > 0:
            mbarrier.wait(bars.index(1), (i - 1) & 1)
        board.index(0).store(gl.full([1], i, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(bars.index(0), count=1)

@gluon.jit
def _reader(board, bars, out, n, WAIT: gl.constexpr):
    total = 0
    for i in range(n):
        if WAIT:
            mbarrier.wait(bars.index(0), i & 1)
        total += gl.max(board.index(0).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(bars.index(1), count=1)
    gl.store(out, total)

@gluon.jit(do_not_specialize=["n"])
def kernel(out, n, WAIT: gl.constexpr):
    board = gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1); mbarrier.init(bars.index(1), count=1)
    fence_async_shared()
    gl.warp_specialize([(_reader, (board, bars, out, n, WAIT)), (_writer, (board, bars, n))], [1], [32])

out = torch.zeros(1, dtype=torch.int32, device="cuda")
kernel[(1,)](out, 50, sys.argv[1] == "wait", num_warps=4)
torch.cuda.synchronize(); print("control", sys.argv[1], out.item(), "of", 50 * 49 // 2)
