"""Write copies of src with patches of the wide backward kernel: variants_wide.py FOLDER NAME..."""
import shutil, sys, pathlib
folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
def sub(text, old, new, count=1):
    assert text.count(old) == count, (text.count(old), old)
    return text.replace(old, new)
def patch(name, root):
    p = root / "flashtile/kernel/hopper/backward_wide.py"; t = p.read_text()
    m = root / "flashtile/kernel/hopper/backward_movers.py"; u = m.read_text()
    opts = name.split("+")
    if "late" in opts:  # P has been read: said after dS has been handed over
        t = sub(t, "    barriers.arrive(P_READ, CONSUMERS)\n    ds = (p", "    ds = (p")
        t = sub(t, "    barriers.arrive(DS_READY + parity, CONSUMERS)\n    gl.thread_barrier()", "    barriers.arrive(DS_READY + parity, CONSUMERS)\n    barriers.arrive(P_READ, CONSUMERS)\n    gl.thread_barrier()")
    if "fence" in opts:
        t = sub(t, "    buffers.p.store(p_slope.to(buffers.p.dtype))\n", "    buffers.p.store(p_slope.to(buffers.p.dtype))\n    fence_async_shared()\n")
    if "wait0" in opts:  # no dq in flight while P is exchanged / dP waited for
        t = sub(t, "    dp = warpgroup_mma_wait(1, [dp])\n", "    dp, dq = warpgroup_mma_wait(0, [dp, dq])\n")
        t = sub(t, "    dq = warpgroup_mma_wait(0, [dq])\n    if has_last:\n        store_dq(1, dq, (it - 1) * PARTS, ", "    if has_last:\n        store_dq(1, dq, (it - 1) * PARTS, ")
    if "dkalone" in opts:
        t = sub(t, "        dq = warpgroup_mma_wait(len(dk), [dq])\n", "        dk = finish(dk, 0)\n        dq = warpgroup_mma_wait(0, [dq])\n")
    if "dkfirst" in opts:  # second part of dq only when dk is done
        t = sub(t, "    if PARTS > 1:\n        dq = _start_dq(1, 1, parity ^ 1, zero, buffers, SIZES)\n    ds = gl.convert", "    ds = gl.convert")
        t = sub(t, "    if PARTS > 1:\n        dq = warpgroup_mma_wait(len(dk), [dq])\n", "    if PARTS > 1:\n        dk = finish(dk, 0)\n        dq = warpgroup_mma_wait(0, [_start_dq(1, 1, parity ^ 1, zero, buffers, SIZES)])\n")
    if "dvfirst" in opts:
        t = sub(t, "    if PARTS > 1:\n        dq = _start_dq(0, 1, (it & 1) ^ 1, zero, buffers, SIZES)\n", "")
        t = sub(t, "    if PARTS > 1:\n        dq = warpgroup_mma_wait(len(dv), [dq])\n", "    if PARTS > 1:\n        dv = finish(dv, 0)\n        dq = warpgroup_mma_wait(0, [_start_dq(0, 1, (it & 1) ^ 1, zero, buffers, SIZES)])\n")
    if "ds_smem" in opts:  # dk from dS in shared memory instead of registers
        t = sub(t, "    ds = gl.convert_layout(ds, operand_layout())\n    dk = start_sums(ds, buffers.q", "    dk = start_sums(buffers.ds.index(parity), buffers.q")
    if "strict" in opts:  # turn passed on when all copies have arrived
        u = sub(u, "then, i > 0, turn + ahead, boxes_in(0, consumer, SIZES))", "then, i > 0, turn + ahead, 0)")
    p.write_text(t); m.write_text(u)
for n in names:
    root = folder / n
    shutil.rmtree(root, ignore_errors=True); shutil.copytree("src", root); patch(n, root)
