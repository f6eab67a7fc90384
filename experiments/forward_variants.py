"""Switches for the Hopper forward kernel, that can be combined: "wmax+skip" and so on. Text in, text out.

Where a consumer waits for P V of the tile before (base: ptxas puts it before the row maximum):
  wmax   after the row maximum         whalf  after half of the exponentials       wall   after all of them
Who may issue:
  tqk    the next consumer as soon as Q K^T is issued    tsplit  when half of P V is issued    tnone  anybody, any time
Work:
  hot    a second, inner loop for full tiles that are neither first nor last of a query tile: no branches
  kpin   K is released as soon as Q K^T is there: in straight code such as "hot" ptxas puts that off until the softmax is done
  lean   row maxima start at the lowest number instead of -inf: no selects for rows without keys
  skip   accumulators are multiplied only where the maximum of a row of the warp grew by more than 2^8 (else it stays)
  imax   row maxima by three-way integer maxima (right for maxima >= 0; else a branch takes the floats' maxima)
  qreg   64 columns of Q in registers           qreg2  128 columns of them
  opaq   a zero that the compiler cannot see in Q's buffer number: fewer descriptors kept in registers
"""

CONSUMER_START = "        tile_max = forward_parts.row_max_of(s)\n"
CONSUMER_END = "        p = gl.convert_layout(p_fp32.to(DTYPE), P_LAYOUT, assert_trivial=True)\n"
ISSUE = """        acc = forward_parts.issue_values(p, rings.v_smem, stage, acc, keep)
        barriers.arrive(SIZES.turn + NEXT, 256)
"""
WAIT_S = "s = warpgroup_mma_wait(len(acc), deps=(s,))"
V_WAIT = "        mbarrier.wait(rings.v_full.index(stage), phase)\n        acc = forward_parts.issue"
IS_LAST = "            slot_before = slot\n"

PARTS = '''
LOWEST = gl.constexpr(@LOWEST@)


@gluon.jit
def after(x):
    """Return ``x`` (two numbers per thread); ptxas then puts later waits after it. The branch is never taken.

    (A predicated ``trap`` makes it serialise the products, an empty loop vanishes, a warp barrier costs 20 instructions.)
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $2, 0f7F800000; setp.gt.or.f32 p, $3, 0f7F800000, p;"
        " mov.b32 $0, $2; mov.b32 $1, $3; @p nanosleep.u32 1; }",
        "=&f,=&f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def pin(number):
    """Keep what comes before from being moved behind what comes after. ``number`` is not negative."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $1, 0; @p nanosleep.u32 1; mov.b32 $0, $1; }",
        "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def halves(x):
    COLUMNS: gl.constexpr = x.shape[1]
    left, right = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))
    layout: gl.constexpr = tile_layout(COLUMNS // 2)
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def shift_of(row_max, tile_max, scales):
    """Return (new_max, shift, scale, alpha)."""
    scale_log2, exact, huge = scales
    new_max = gl.maximum(row_max, tile_max)
    @SKIP@
    @SHIFT@
    exact = gl.where(gl.abs(shift) > FAR_LOGIT, gl.minimum(exact, 1.0), exact)
    scale = gl.where(gl.abs(shift) > huge, exact, scale_log2)
    return new_max, shift, scale, gl.exp2((row_max - shift) * scale)


@gluon.jit
def exponentials(s, shift, scale):
    layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    shift = gl.convert_layout(shift, layout, assert_trivial=True)
    scale = gl.convert_layout(scale, layout, assert_trivial=True)
    return gl.exp2(s * scale[:, None] - (shift * scale)[:, None])


@gluon.jit
def add_sums(row_sum, alpha, p):
    kept = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)[:, None]
    return kept + gl.convert_layout(row_sum_of(p), row_sum.type.layout, assert_trivial=True)


@gluon.jit
def more_sums(row_sum, p):
    return row_sum + gl.convert_layout(row_sum_of(p), row_sum.type.layout, assert_trivial=True)


@gluon.jit
def operand(p, acc, DTYPE: gl.constexpr):
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, acc[0].type.layout, 2), assert_trivial=True)


@gluon.jit
def issue_half(p, v_smem, stage, acc, keep, HALF: gl.constexpr):
    COUNT: gl.constexpr = p.shape[1]
    first = warpgroup_mma(p, _matrix(v_smem[0], stage).slice(HALF * COUNT, COUNT, 0), acc[0], use_acc=keep, is_async=True)
    if len(acc) == 1:
        return (first,)
    else:
        p = gl.convert_layout(p, gl.DotOperandLayout(0, acc[1].type.layout, 2), assert_trivial=True)
        v = _matrix(v_smem[1], stage).slice(HALF * COUNT, COUNT, 0)
        return (first, warpgroup_mma(p, v, acc[1], use_acc=keep, is_async=True))


@gluon.constexpr_function
def _rescale_asm(n):
    a = "{ .reg .pred p, q; setp.neu.f32 p, $%d, 0f3F800000; setp.neu.f32 q, $%d, 0f3F800000; or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; " % (2 * n, 2 * n + 2)
    return a + "".join("mul.f32 $%d, $%d, $%d; " % (i, i, 2 * n + i % 4 // 2 * 2) for i in range(n)) + "DONE: }"


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def _scale_if_needed(acc, factor):
    """Multiply rows by their factors, unless those of this thread's warp are all 1. (A thread has rows A A B B A A ...)"""
    N: gl.constexpr = min(64, acc.shape[1] // 2)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    factor = gl.broadcast(factor, acc)[0]
    return gl.inline_asm_elementwise(_rescale_asm(N), _rescale_constraints(N), [acc, factor], dtype=gl.float32, is_pure=False, pack=N)


@gluon.jit
def scale_rows_if_needed(acc, factor):
    if len(acc) == 1:
        return (_scale_if_needed(acc[0], factor),)
    else:
        return (_scale_if_needed(acc[0], factor), _scale_if_needed(acc[1], factor))


@gluon.jit
def queries(rings, q_index, COLUMNS: gl.constexpr, SIZES: gl.constexpr):
    layout: gl.constexpr = gl.DotOperandLayout(0, tile_layout(SIZES.block_n), 2)
    return _matrix(rings.q_smem[0], q_index).slice(0, COLUMNS, 1).load(layout)


@gluon.jit
def issue_scores_from(q, rings, q_index, stage, SIZES: gl.constexpr):
    """Start S = Q K^T with the first columns of Q in registers."""
    zero = gl.zeros([ROWS, SIZES.block_n], gl.float32, layout=tile_layout(SIZES.block_n))
    k, rest = _matrix(rings.k_smem[0], stage), _matrix(rings.q_smem[0], q_index)
    IN: gl.constexpr = q.shape[1]
    COLUMNS: gl.constexpr = k.shape[1]
    s = warpgroup_mma(q, k.slice(0, IN, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    if IN == 64 and COLUMNS >= 128:
        s = warpgroup_mma(rest.slice(64, 64, 1), k.slice(64, 64, 1).permute((1, 0)), s, is_async=True)
    if COLUMNS == 256:
        s = warpgroup_mma(rest.slice(128, 128, 1), k.slice(128, 128, 1).permute((1, 0)), s, is_async=True)
    if len(rings.k_smem) == 2:
        k = _matrix(rings.k_smem[1], stage).permute((1, 0))
        s = warpgroup_mma(_matrix(rings.q_smem[1], q_index), k, s, is_async=True)
    return s


@gluon.constexpr_function
def _imax_asm(n):
    """Row maxima of a thread as integers, three at a time; where one is negative, as floats."""
    rows = [[i for i in range(n) if i % 4 // 2 == row] for row in (0, 1)]
    a = "{ .reg .b32 x<%d>; .reg .s32 m<4>; .reg .f32 f<4>; .reg .pred p, q; " % n
    a += "".join("mov.b32 x%d, $%d; " % (i, n + i) for i in range(n))
    chains = [(2 * row + half, rows[row][half * n // 4 : (half + 1) * n // 4]) for row in (0, 1) for half in (0, 1)]
    for step in range(1, n // 4):
        for m, chain in chains:
            first = "x%d" % chain[0] if step == 1 else "m%d" % m
            a += "max.s32 m%d, %s, x%d; " % (m, first, chain[step])
    a += "max.s32 m0, m0, m1; max.s32 m2, m2, m3; "
    a += "setp.lt.s32 p, m0, 0; setp.lt.s32 q, m2, 0; or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; "
    a += "mov.b32 f0, m0; mov.b32 f2, m2; @!p bra.uni DONE; "
    for step in range(1, n // 4):
        for m, chain in chains:
            first = "$%d" % (n + chain[0]) if step == 1 else "f%d" % m
            a += "max.f32 f%d, %s, $%d; " % (m, first, n + chain[step])
    a += "max.f32 f0, f0, f1; max.f32 f2, f2, f3; DONE: "
    return a + "".join("mov.f32 $%d, f%d; " % (i, i % 4 // 2 * 2) for i in range(n)) + "}"


@gluon.constexpr_function
def _imax_constraints(n):
    return ",".join(["=&f"] * n + ["f"] * n)


@gluon.jit
def _first_columns(x):
    if x.shape[1] == 8:
        return x
    else:
        return _first_columns(halves(x)[0])


@gluon.jit
def row_max_by_integers(s):
    N: gl.constexpr = s.shape[1] // 2
    m = gl.inline_asm_elementwise(_imax_asm(N), _imax_constraints(N), [s], dtype=gl.float32, is_pure=False, pack=N)
    largest = gl.max(gl.max(gl.max(_by_thread(_first_columns(m)), 3), 1), 1)
    return gl.convert_layout(largest, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


# --- results'''


def _between(text, start, end, new):
    i = text.index(start)
    j = text.index(end, i) + len(end)
    return text[:i] + new + text[j:]


def _swap(text, old, new):
    assert text.count(old) >= 1, old
    return text.replace(old, new)


def _with_hot_loop(forward):
    """Put a loop behind the general step, for key tiles without mask that are neither first nor last of a query tile."""
    start = forward.index("        is_last = step == first\n")
    end = forward.index("    if any_tile:\n")
    body = forward[start:end]
    lines, hot, skipping = body.splitlines(), [], None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if skipping is not None and line.strip() and depth <= skipping:
            skipping = None
        if skipping is None and line.strip() in ("if (step >= full_end) | (step < full_first):", "if writes:", "if is_last:"):
            skipping = depth
        if skipping is not None or line.strip() in ("is_last = step == first", "writes = is_last") or "arrive_if(is_last" in line:
            continue
        hot.append(("    " + line).replace("keep = writes == 0", "keep = live") if line.strip() else line)
    head = """        # The hot loop.
        stop = gl.where(writes | (step >= full_end), step + 1, gl.maximum(full_first, first + 1))
        while step >= stop:
"""
    return forward[:end] + head + "\n".join(hot) + "\n" + forward[end:]


def apply(options, forward, parts):
    """Return the texts of forward.py and forward_parts.py with ``options``, a set of names."""
    wait = next((o for o in ("wmax", "whalf", "wall") if o in options), "base")
    split, lean, skip = "tsplit" in options, "lean" in options, "skip" in options
    q_columns = 64 if "qreg" in options else 128 if "qreg2" in options else 0
    lowest = "-3.4028234663852886e38" if lean else 'float("-inf")'
    text = PARTS.replace("@LOWEST@", lowest)
    text = text.replace("@SKIP@", "new_max = gl.where((new_max - row_max) * scale_log2 > 8.0, new_max, row_max)" if skip else "")
    if skip and not lean:
        text = text.replace("(new_max - row_max) * scale_log2 > 8.0", "(new_max - gl.maximum(row_max, -3.0e38)) * scale_log2 > 8.0")
    text = text.replace("@SHIFT@", "shift = new_max" if lean else 'shift = gl.where(new_max == float("-inf"), 0.0, new_max)')
    parts = _swap(parts, "# --- results", text)
    if lean:
        parts = _swap(parts, "    lse = lse_from_softmax(gl.convert_layout(row_max, layout, assert_trivial=True), total, logit_scale)",
                      "    row_max = gl.where(total == 0.0, float(\"-inf\"), gl.convert_layout(row_max, layout, assert_trivial=True))\n    lse = lse_from_softmax(row_max, total, logit_scale)")
        forward = _swap(forward, 'row_max = gl.full([ROWS], float("-inf"), gl.float32', "row_max = gl.full([ROWS], forward_parts.LOWEST, gl.float32")

    two = split or wait == "whalf"
    body = CONSUMER_START
    if "imax" in options:
        body = body.replace("row_max_of", "row_max_by_integers")
    if wait == "wmax":
        body += "        tile_max = forward_parts.after(tile_max)\n"
    late = wait in ("whalf", "wall")
    wait_values = """        acc = forward_parts.wait_values(acc)
        barriers.arrive(SIZES.v_free + stage, SIZES.threads)
        if writes:
            at = schedule.read_place(rings.board, slot_before, seqlen_q, seqlen_k, SIZES.packed)
            forward_parts.write_rows(out, acc, done_max, done_sum, at, logit_scale, sinks_ptr, CONSUMER, SIZES)
        keep = writes == 0
"""
    if not late:
        body += wait_values
    body += "        row_max, shift, scale, alpha = forward_parts.shift_of(row_max, tile_max, scales)\n"
    if two:
        body += "        s0, s1 = forward_parts.halves(s)\n        p0 = forward_parts.exponentials(s0, shift, scale)\n        row_sum = forward_parts.add_sums(row_sum, alpha, p0)\n"
        if wait == "whalf":
            body += "        row_sum = forward_parts.after(row_sum)\n" + wait_values
        body += "        p1 = forward_parts.exponentials(s1, shift, scale)\n        row_sum = forward_parts.more_sums(row_sum, p1)\n"
        if wait == "wall":
            body += "        row_sum = forward_parts.after(row_sum)\n" + wait_values
    else:
        body += "        p_fp32 = forward_parts.exponentials(s, shift, scale)\n        row_sum = forward_parts.add_sums(row_sum, alpha, p_fp32)\n"
        if wait == "wall":
            body += "        row_sum = forward_parts.after(row_sum)\n" + wait_values
    body += f"        acc = forward_parts.scale_rows{'_if_needed' if skip else ''}(acc, alpha)\n"
    body += "        p0, p1 = forward_parts.operand(p0, acc, DTYPE), forward_parts.operand(p1, acc, DTYPE)\n" if two else CONSUMER_END
    forward = _between(forward, CONSUMER_START, CONSUMER_END, body)
    # The finished statistics of a query tile are put aside where it ends.
    forward = _swap(forward, IS_LAST, IS_LAST + "            done_max, done_sum = row_max, row_sum\n"
                    "            row_max, row_sum = gl.full_like(row_max, forward_parts.LOWEST), gl.full_like(row_sum, 0.0)\n")
    forward = _swap(forward, "    row_sum = forward_parts.row_sum_of(s)\n", "    row_sum = forward_parts.row_sum_of(s)\n    done_max, done_sum = row_max, row_sum\n")
    end = forward.index("    if any_tile:\n")
    forward = forward[:end] + _swap(forward[end:], "write_rows(out, acc, row_max, row_sum,", "write_rows(out, acc, done_max, done_sum,")
    if two:
        forward = _swap(forward, "    p = gl.zeros([ROWS, SIZES.block_n], DTYPE, layout=P_LAYOUT)\n",
                        "    p0 = gl.zeros([ROWS, SIZES.block_n // 2], DTYPE, layout=P_LAYOUT)\n    p1 = p0\n")
        forward = _swap(forward, "acc = forward_parts.wait_values(forward_parts.issue_values(p, rings.v_smem, stage, acc, keep))",
                        "acc = forward_parts.issue_half(p0, rings.v_smem, stage, acc, keep, 0)\n        acc = forward_parts.wait_values(forward_parts.issue_half(p1, rings.v_smem, stage, acc, True, 1))")
        arrive = "        barriers.arrive(SIZES.turn + NEXT, 256)\n"
        first = "        acc = forward_parts.issue_half(p0, rings.v_smem, stage, acc, keep, 0)\n"
        second = "        acc = forward_parts.issue_half(p1, rings.v_smem, stage, acc, True, 1)\n"
        forward = _swap(forward, ISSUE, first + arrive + second if split else first + second + arrive)
        forward = _swap(forward, WAIT_S, WAIT_S.replace("len(acc)", "2 * len(acc)"))
    if "tqk" in options:
        forward = _swap(forward, "        barriers.arrive(SIZES.turn + NEXT, 256)\n", "")
        forward = _swap(forward, V_WAIT, "        barriers.arrive(SIZES.turn + NEXT, 256)\n" + V_WAIT)
    if "tnone" in options:
        for line in ("        barriers.sync(SIZES.turn + CONSUMER, 256)\n", "        barriers.arrive(SIZES.turn + NEXT, 256)\n"):
            forward = _swap(forward, line, "")
        for line in ("        barriers.arrive(SIZES.turn, 256)\n", "        barriers.sync(SIZES.turn, 256)\n"):
            forward = _swap(forward, line, "        pass\n")
    q_index = "q_buffer * SIZES.consumers + CONSUMER"
    if "opaq" in options:
        forward = _swap(forward, f"rings, {q_index}", f"rings, {q_index} + gl.minimum(step, 0)")
    if q_columns:
        load = f"q = forward_parts.queries(rings, {q_index}, {q_columns}, SIZES)\n"
        forward = _swap(forward, "    any_tile, keep, writes = ", f"    {load}    any_tile, keep, writes = ")
        pred = "            mbarrier.wait(rings.q_full.index(q_buffer), q_phase, pred=live)\n"
        forward = _swap(forward, pred, pred + f"            {load}")
        forward = _swap(forward, "forward_parts.issue_scores(rings", "forward_parts.issue_scores_from(q, rings")
    if "kpin" in options:
        release = "        barriers.arrive(SIZES.k_free + stage, SIZES.threads)\n"
        forward = _swap(forward, release, release + "        forward_parts.pin(step)\n")
    if "hot" in options:
        forward = _with_hot_loop(forward)
    return forward, parts
