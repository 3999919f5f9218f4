"""An mLSTM of four tokens in chunks of two, as transformers' xLSTM writes it, for tests of what becomes of it."""

HEAD = '<ir_version: 8, opset_import: ["" : 18]> main '
INPUTS = """(float[b,4,2,3] q, float[b,4,2,3] k, float[b,4,2,5] v, float[b,4,2] i, float[b,4,2] f)
    => (float[b,4,2,5] y)"""
CONSTANTS = """<int64[5] of_keys = {0,2,2,2,3}, int64[5] of_values = {0,2,2,2,5}, int64[4] of_gates = {0,2,2,2},
    int64 three = {3}, int64[1] axis2 = {2}, int64[1] axis3 = {3}, int64[1] axis4 = {4}, int64[1] zero = {0},
    int64[1] one = {1}, int64[1] two = {2}, bool[2,2] future = {0,1,0,0}, float low = {-inf},
    float scale = {0.57735026}, float small = {0.000001}, int64[4] whole = {0,4,2,5}>"""
NODES = """{
    q5 = Reshape (q, of_keys)  qc = Transpose <perm = [0,3,1,2,4]> (q5)
    k5 = Reshape (k, of_keys)  kc = Transpose <perm = [0,3,1,2,4]> (k5)
    v5 = Reshape (v, of_values)  vc = Transpose <perm = [0,3,1,2,4]> (v5)
    i4 = Reshape (i, of_gates)  ic = Transpose <perm = [0,3,1,2]> (i4)
    f4 = Reshape (f, of_gates)  fc = Transpose <perm = [0,3,1,2]> (f4)
    open = Sigmoid (fc)  logs = Log (open)  s = CumSum (logs, three)  last = Slice (s, one, two, axis3)
    left = Sub (last, s)  a = Add (left, ic)  tops = ReduceMax (a, axis3)
    last0 = Slice (last, zero, one, axis2)  top0 = Slice (tops, zero, one, axis2)  m1 = Max (last0, top0)
    a0 = Slice (a, zero, one, axis2)  gaps = Sub (a0, m1)  taken = Exp (gaps)  column = Unsqueeze (taken, axis4)
    k0 = Slice (kc, zero, one, axis2)  v0 = Slice (vc, zero, one, axis2)  kd = Mul (k0, column)
    kdt = Transpose <perm = [0,1,2,4,3]> (kd)  c1 = MatMul (kdt, v0)  n1 = ReduceSum <keepdims = 0> (kd, axis3)
    m0 = Sub (m1, m1)  c0 = Sub (c1, c1)  n0 = Sub (n1, n1)
    ms = Concat <axis = 2> (m0, m1)  cs = Concat <axis = 2> (c0, c1)  ns = Concat <axis = 2> (n0, n1)
    rows = Unsqueeze (s, axis4)  columns = Unsqueeze (s, axis3)  between = Sub (rows, columns)
    past = Where (future, low, between)  irow = Unsqueeze (ic, axis3)  logd = Add (past, irow)
    intra = ReduceMax (logd, axis4)  sums = Add (s, ms)  inter = Unsqueeze (sums, axis4)  m = Max (inter, intra)
    far = Sub (logd, m)  d = Exp (far)  qs = Mul (qc, scale)  kt = Transpose <perm = [0,1,2,4,3]> (kc)
    scores = MatMul (qs, kt)  p = Mul (scores, d)  before = Sub (inter, m)  kept = Exp (before)  qd = Mul (qs, kept)
    outer = MatMul (qd, cs)  inner = MatMul (p, vc)  results = Add (outer, inner)
    ncolumn = Unsqueeze (ns, axis4)  outer1 = MatMul (qd, ncolumn)  inner1 = ReduceSum (p, axis4)
    sum = Add (outer1, inner1)  size = Abs (sum)  minus = Neg (m)  least = Exp (minus)  most = Max (size, least)
    below = Add (most, small)  h = Div (results, below)
    yc = Transpose <perm = [0,2,3,1,4]> (h)  y = Reshape (yc, whole)
}"""
TEXT = HEAD + INPUTS + CONSTANTS + NODES
