"""The texts of named_regions.py: for each region the network, the inputs, the outputs, the nodes and the batch.

Behind the batch may stand the number of regions, and the share of an integer output that may differ.
"""

from __future__ import annotations

from typing import Any

VISION: dict[str, tuple[Any, ...]] = {
    "swin roll and windows": (
        "Swin-T, stage 1, shifted blocks", "float16[B,56,56,96] x", "y", """
            z0 := int64[1] {0} z3 := int64[1] {3} end := int64[1] {56} one := int64[1] {1} two := int64[1] {2}
            head1 = Slice (x, z0, z3, one) tail1 = Slice (x, z3, end, one) rolled1 = Concat <axis = 1> (tail1, head1)
            head2 = Slice (rolled1, z0, z3, two) tail2 = Slice (rolled1, z3, end, two)
            rolled = Concat <axis = 2> (tail2, head2) split := int64[6] {-1, 8, 7, 8, 7, 96}
            rows := int64[3] {-1, 49, 96} s = Reshape (rolled, split) t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (s)
            y = Reshape (t, rows)
        """, 16,
    ),
    "swin windows": (
        "Swin-T, stage 1, other blocks", "float16[B,56,56,96] x, float16[96] shift", "y", """
            split := int64[6] {-1, 8, 7, 8, 7, 96} rows := int64[3] {-1, 49, 96} m = Add (x, shift)
            s = Reshape (m, split) t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (s) y = Reshape (t, rows)
        """, 16,
    ),
    "swin windows back": (
        "Swin-T, stage 1, behind the projection", "float16[B,64,49,96] w, float16[B,3136,96] residual", "y", """
            split := int64[6] {-1, 8, 8, 7, 7, 96} image := int64[4] {-1, 56, 56, 96} rows := int64[3] {-1, 3136, 96}
            s = Reshape (w, split) t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (s) x = Reshape (t, image)
            z0 := int64[1] {0} z53 := int64[1] {53} end := int64[1] {56} one := int64[1] {1} two := int64[1] {2}
            head1 = Slice (x, z0, z53, one) tail1 = Slice (x, z53, end, one)
            rolled1 = Concat <axis = 1> (tail1, head1) head2 = Slice (rolled1, z0, z53, two)
            tail2 = Slice (rolled1, z53, end, two) rolled = Concat <axis = 2> (tail2, head2)
            flattened = Reshape (rolled, rows) y = Add (flattened, residual)
        """, 16,
    ),
    "swin patch merging": (
        "Swin-T, between stages", "float16[B,56,56,96] x", "y", """
            z0 := int64[1] {0} z1 := int64[1] {1} end := int64[1] {56} one := int64[1] {1} two := int64[1] {2}
            rows := int64[3] {-1, 784, 384} a = Slice (x, z0, end, one, two) b = Slice (x, z1, end, one, two)
            aa = Slice (a, z0, end, two, two) ab = Slice (a, z1, end, two, two) ba = Slice (b, z0, end, two, two)
            bb = Slice (b, z1, end, two, two) c = Concat <axis = 3> (aa, ba, ab, bb) y = Reshape (c, rows)
        """, 16,
    ),
    "swin bias and mask": (
        "Swin-T, scores of shifted windows",
        "float16[B,64,3,49,49] x, float16[169,3] table, int64[2401] index, float16[64,1,49,49] mask", "y", """
            square := int64[3] {49, 49, 3} flat := int64[4] {-1, 3, 49, 49} g = Gather (table, index)
            r = Reshape (g, square) t = Transpose <perm = [2, 0, 1]> (r) b = Add (x, t) z = Add (b, mask)
            y = Reshape (z, flat)
        """, 8,
    ),
    "swin v2 cosine": (
        "SwinV2-T, queries", "float16[B,49,3,32] x, float16[3,1,1] scale", "y", """
            least := float16 {0.0001} h = Transpose <perm = [0, 2, 1, 3]> (x)
            n = ReduceL2 <axes = [3], keepdims = 1> (h) m = Max (n, least) d = Div (h, m) y = Mul (d, scale)
        """, 1024,
    ),
    "sam relative positions": (
        "SAM ViT-B, windows of 14",
        "float16[B,14,14,14,14] x, float16[B,14,14,14,1] r, float16[B,14,14,1,14] c", "y", """
            flat := int64[3] {0, 196, 196} a = Add (x, r) b = Add (a, c) y = Reshape (b, flat)
        """, 300,
    ),
    "levit bias": (
        "LeViT-256, scores", "float16[B,4,196,196] x, float16[4,196] biases, int64[196,196] index", "y", """
            half := float16 {0.25} g = Gather <axis = 1> (biases, index) s = Mul (x, half) y = Add (s, g)
        """, 32,
    ),
    "mae patchify": (
        "MAE ViT-L, targets", "float16[B,3,224,224] x, float16[3,1,1] mean, float16[3,1,1] deviation", "y", """
            split := int64[6] {-1, 3, 14, 16, 14, 16} rows := int64[3] {-1, 196, 768} m = Sub (x, mean)
            n = Div (m, deviation) s = Reshape (n, split) t = Transpose <perm = [0, 2, 4, 3, 5, 1]> (s)
            y = Reshape (t, rows)
        """, 32,
    ),
    "internvl pixel shuffle": (
        "InternVL2-8B, projector", "float16[B,32,32,1024] x", "y", """
            a := int64[4] {-1, 32, 16, 2048} b := int64[4] {-1, 16, 16, 4096} r = Reshape (x, a)
            t = Transpose <perm = [0, 2, 1, 3]> (r) s = Reshape (t, b) y = Transpose <perm = [0, 2, 1, 3]> (s)
        """, 13,
    ),
    "convnext layer scale": (
        "ConvNeXt-T, end of a block",
        "float16[B,56,56,96] x, float16[96] gamma, float16[B,96,56,56] residual", "y", """
            s = Mul (x, gamma) t = Transpose <perm = [0, 3, 1, 2]> (s) y = Add (t, residual)
        """, 16,
    ),
    "convnext v2 response": (
        "ConvNeXtV2-T, global response norm",
        "float16[B,56,56,384] x, float16[B,1,1,384] norm, float16[384] gamma, float16[384] beta", "y", """
            g = Mul (x, norm) s = Mul (g, gamma) b = Add (s, beta) y = Add (b, x)
        """, 8,
    ),
    "efficientnet squeeze": (
        "EfficientNet-B0, in front of the squeeze", "float16[B,96,112,112] x", "c m", """
            low := float16 {0} high := float16 {6} c = Clip (x, low, high)
            m = ReduceMean <axes = [2, 3], keepdims = 1> (c)
        """, 16,
    ),
    "mobilenet gate": (
        "MobileNetV3-L, gates of a block", "float16[B,120,28,28] x, float16[B,120,1,1] gate", "y", """
            h = HardSigmoid <alpha = 0.16666667, beta = 0.5> (gate) m = Mul (x, h) y = Tanh (m)
        """, 64,
    ),
    "stylegan adaptive norm": (
        "AdaIN, a layer of 64 x 64",
        "float16[B,512,64,64] x, float16[B,512,1,1] scale, float16[B,512,1,1] shift", "y", """
            e := float16 {0.00001} m = ReduceMean <axes = [2, 3], keepdims = 1> (x) d = Sub (x, m) q = Mul (d, d)
            v = ReduceMean <axes = [2, 3], keepdims = 1> (q) a = Add (v, e) r = Sqrt (a) n = Div (d, r)
            s = Mul (n, scale) y = Add (s, shift)
        """, 8,
    ),
    "yolo decode": (
        "YOLOv5-s, the largest level",
        "float16[B,3,80,80,85] x, float16[1,1,80,80,2] grid, float16[1,3,1,1,2] anchors", "y", """
            parts := int64[3] {2, 2, 81} two := float16 {2} half := float16 {0.5} eight := float16 {8}
            flat := int64[3] {0, -1, 85} s = Sigmoid (x) xy, wh, rest = Split <axis = 4> (s, parts) a = Mul (xy, two)
            b = Sub (a, half) c = Add (b, grid) d = Mul (c, eight) f = Mul (wh, two) g = Mul (f, f)
            h = Mul (g, anchors) j = Concat <axis = 4> (d, h, rest) y = Reshape (j, flat)
        """, 8,
    ),
    "boxes of detr": (
        "DETR, postprocessing", "float[B,300,4] boxes, float[B,1,4] sizes", "y", """
            parts := int64[2] {2, 2} half := float {0.5} c, s = Split <axis = 2> (boxes, parts) h = Mul (s, half)
            low = Sub (c, h) high = Add (c, h) j = Concat <axis = 2> (low, high) y = Mul (j, sizes)
        """, 512,
    ),
}  # fmt: skip

LANGUAGE: dict[str, tuple[Any, ...]] = {
    "t5 clamp": (
        "T5-base encoder, behind a residual", "float16[B,256,768] x, float16[B,256,768] residual", "y", """
            zero := float16 {0} narrow := float16 {63504} wide := float16 {65504} h = Add (x, residual)
            f = Cast <to = 1> (h) i = IsInf (f) n = Cast <to = 6> (i) some = ReduceMax <keepdims = 0> (n)
            any = Cast <to = 9> (some) limit = Where (any, narrow, wide) low = Neg (limit) a = Max (h, low)
            y = Min (a, limit)
        """, 8,
    ),
    "deberta scores": (
        "DeBERTa-v3-base, sum of three scores",
        "float16[B,12,128,128] x, float16[B,12,128,128] c2p, "
        "float16[B,12,128,128] p2c, bool[B,1,128,128] mask", "y", """
            scale := float16 {0.0721688} least := float16 {-65504} t = Transpose <perm = [0, 1, 3, 2]> (p2c)
            s = Mul (x, scale) a = Add (s, c2p) b = Add (a, t) y = Where (mask, b, least)
        """, 8,
    ),
    "deberta buckets": (
        "DeBERTa-v3-base, relative positions", "int64[2048,1] q, int64[1,2048] k", "y", """
            mid := int64 {128} negative := int64 {-128} below := int64 {127} middle := float {128}
            per := float {1.3841} near := float {127} r = Sub (q, k) sign = Sign (r) less = Less (r, mid)
            more = Greater (r, negative) inside = And (less, more) distance = Abs (r)
            a = Where (inside, below, distance) f = Cast <to = 1> (a) d = Div (f, middle) l = Log (d) p = Div (l, per)
            m = Mul (p, near) c = Ceil (m) s = Add (c, middle) i = Cast <to = 7> (s) g = Mul (i, sign)
            close = LessOrEqual (a, mid) y = Where (close, r, g)
        """, 1, 1, 0.001,
    ),
    "alibi": (
        "BLOOM-560m, scores", "float16[B,16,512,512] x, float16[16,1,1] slopes, int64[B,512] mask", "y", """
            one := int64[1] {1} axes := int64[2] {1, 2} least := float16 {-65504} c := int64 {1} sums = Sub (mask, c)
            places = Unsqueeze (sums, axes) f = Cast <to = 10> (places) a = Mul (f, slopes) t = Cast <to = 9> (mask)
            keep = Unsqueeze (t, axes) s = Add (x, a) y = Where (keep, s, least)
        """, 4,
    ),
    "soft capping": (
        "Gemma 2 9B, scores", "float16[B,16,1024,1024] x, bool[1,1,1024,1024] mask", "y", """
            cap := float16 {50} least := float16 {-65504} d = Div (x, cap) t = Tanh (d) m = Mul (t, cap)
            y = Where (mask, m, least)
        """, 2,
    ),
    "logit capping": (
        "Gemma 2 9B, head", "float16[B,256000] x", "y", """
            cap := float {30} f = Cast <to = 1> (x) d = Div (f, cap) t = Tanh (d) y = Mul (t, cap)
        """, 128,
    ),
    "padding and causal mask": (
        "BERT-style decoders, mask of scores", "int64[B,1024] mask, int64[1,1024] k, int64[1024,1] q", "y", """
            axes := int64[2] {1, 2} zero := float16 {0} least := float16 {-65504} t = Cast <to = 9> (mask)
            m = Unsqueeze (t, axes) c = LessOrEqual (k, q) b = And (m, c) y = Where (b, zero, least)
        """, 16,
    ),
    "repeated heads": (
        "Llama-3-8B, keys of a cache", "float16[B,8,1,2048,128] x", "y", """
            wide := int64[5] {1, 1, 4, 1, 1} heads := int64[4] {0, 32, 2048, 128} e = Expand (x, wide)
            r = Reshape (e, heads) y = Transpose <perm = [0, 1, 3, 2]> (r)
        """, 2,
    ),
    "token shift": (
        "RWKV-4 430M, time mix",
        "float16[B,1024,1024] x, float16[1024] k, float16[1024] v, float16[1024] r", "a b c", """
            pads := int64[6] {0, 1, 0, 0, -1, 0} p = Pad (x, pads) d = Sub (x, p) dk = Mul (d, k) dv = Mul (d, v)
            dr = Mul (d, r) a = Add (p, dk) b = Add (p, dv) c = Add (p, dr)
        """, 8,
    ),
    "squared relu": (
        "Primer / Nemotron-4, middle of the MLP", "float16[B,2048,4096] x, float16[B,2048,4096] up", "y", """
            r = Relu (x) s = Mul (r, r) y = Mul (s, up)
        """, 2,
    ),
    "mamba skip": (
        "Mamba-370m, end of the scan", "float16[B,1024,2048] x, float16[B,1024,2048] u, float16[2048] d", "y", """
            two := float16 {2} s = Mul (u, d) a = Add (x, s) t = Tanh (a) y = Mul (t, two)
        """, 4,
    ),
    "router scores": (
        "DeepSeek-V3, router", "float[B,256] x, float[256] bias", "biased weights", """
            axis := int64[1] {1} scale := float {2.5} e := float {1e-20} s = Sigmoid (x) biased = Add (s, bias)
            t = ReduceSum <keepdims = 1> (s, axis) u = Add (t, e) n = Div (s, u) weights = Mul (n, scale)
        """, 8192,
    ),
    "router top-1": (
        "Switch-base-64, router", "float16[B,64] x", "index top", """
            f = Cast <to = 1> (x) index = ArgMax <axis = 1, keepdims = 0> (f)
            top = ReduceMax <axes = [1], keepdims = 0> (f)
        """, 32768,
    ),
    "log-softmax head": (
        "GPT-2, loss", "float16[B,50257] x", "y", """
            f = Cast <to = 1> (x) y = LogSoftmax <axis = 1> (f)
        """, 512,
    ),
    "loss by labels": (
        "GPT-2, loss", "float16[B,50257] x, int64[B,1] label", "y", """
            f = Cast <to = 1> (x) l = LogSoftmax <axis = 1> (f) g = GatherElements <axis = 1> (l, label) y = Neg (g)
        """, 512,
    ),
    "top-1 token": (
        "GPT-2, greedy decoding", "float16[B,50257] x", "ended y", """
            eos := int64 {50256} f = Cast <to = 1> (x) y = ArgMax <axis = 1, keepdims = 0> (f) ended = Equal (y, eos)
        """, 256,
    ),
    "mean pooling": (
        "all-MiniLM-L6, pooled tokens", "float16[B,128,384] x, int64[B,128,1] mask", "y", """
            wide := int64[3] {1, 1, 384} one := int64[1] {1} e := float16 {0.0001} g = Expand (mask, wide)
            u = Cast <to = 10> (g) w = Mul (x, u) s = ReduceSum <keepdims = 0> (w, one)
            c = ReduceSum <keepdims = 0> (u, one) d = Max (c, e) y = Div (s, d)
        """, 256,
    ),
    "unit embeddings": (
        "CLIP ViT-L, pooled embeddings", "float16[B,768] x", "y", """
            e := float {1e-12} one := int64[1] {1} f = Cast <to = 1> (x) q = Mul (f, f)
            s = ReduceSum <keepdims = 1> (q, one) r = Sqrt (s) m = Max (r, e) d = Div (f, m) y = Cast <to = 10> (d)
        """, 8192,
    ),
    "quantized rows": (
        "Llama-3-8B W8A8, inputs of products", "float16[B,4096] x", "y scale", """
            top := float {127} low := float {-128} e := float {1e-6} f = Cast <to = 1> (x) a = Abs (f)
            m = ReduceMax <axes = [1], keepdims = 1> (a) n = Max (m, e) scale = Div (n, top) d = Div (f, scale)
            r = Round (d) c = Clip (r, low, top) y = Cast <to = 3> (c)
        """, 4096, 1, 0.001,
    ),
    "quantized embedding": (
        "int8 embeddings of 768", "int64[B,512] ids, int8[50000,768] table, float16[50000,1] scales", "y", """
            g = Gather (table, ids) s = Gather (scales, ids) f = Cast <to = 10> (g) y = Mul (f, s)
        """, 32,
    ),
}  # fmt: skip

GENERATIVE: dict[str, tuple[Any, ...]] = {
    "dit modulate": (
        "DiT-XL/2, behind a norm", "float16[B,256,1152] x, float16[B,6912] c", "y", """
            z0 := int64[1] {0} z1 := int64[1] {1152} z2 := int64[1] {2304} one := int64[1] {1} unit := float16 {1}
            shift = Slice (c, z0, z1, one) scale = Slice (c, z1, z2, one) s = Unsqueeze (scale, one)
            t = Unsqueeze (shift, one) a = Add (s, unit) m = Mul (x, a) y = Add (m, t)
        """, 16,
    ),
    "dit gate": (
        "DiT-XL/2, residual", "float16[B,256,1152] x, float16[B,256,1152] branch, float16[B,6912] c", "y", """
            z2 := int64[1] {2304} z3 := int64[1] {3456} one := int64[1] {1} g = Slice (c, z2, z3, one)
            u = Unsqueeze (g, one) m = Mul (branch, u) y = Add (x, m)
        """, 16,
    ),
    "dit unpatchify": (
        "DiT-XL/2, output", "float16[B,256,32] x, float16[32] shift", "y", """
            split := int64[6] {-1, 16, 16, 2, 2, 8} image := int64[4] {-1, 8, 32, 32} m = Add (x, shift)
            s = Reshape (m, split) t = Transpose <perm = [0, 5, 1, 3, 2, 4]> (s) y = Reshape (t, image)
        """, 256,
    ),
    "guidance": (
        "Stable Diffusion XL, guidance and Euler step", "float16[B,2,4,128,128] e, float16[B,4,128,128] x", "y", """
            z0 := int64 {0} z1 := int64 {1} scale := float16 {7.5} step := float16 {-0.03125}
            u = Gather <axis = 1> (e, z0) c = Gather <axis = 1> (e, z1) d = Sub (c, u) m = Mul (d, scale)
            g = Add (u, m) s = Mul (g, step) y = Add (x, s)
        """, 16,
    ),
    "vae sample": (
        "Stable Diffusion VAE, latents", "float16[B,8,64,64] x, float16[B,4,64,64] noise", "y", """
            parts := int64[2] {4, 4} low := float16 {-30} high := float16 {20} half := float16 {0.5}
            s := float16 {0.18215} mean, logs = Split <axis = 1> (x, parts) c = Clip (logs, low, high)
            h = Mul (c, half) e = Exp (h) n = Mul (e, noise) z = Add (mean, n) y = Mul (z, s)
        """, 32,
    ),
    "vae image": (
        "Stable Diffusion VAE, bytes of the image", "float16[B,3,512,512] x", "y", """
            half := float {0.5} zero := float {0} one := float {1} top := float {255} f = Cast <to = 1> (x)
            h = Mul (f, half) a = Add (h, half) c = Clip (a, zero, one) t = Transpose <perm = [0, 2, 3, 1]> (c)
            m = Mul (t, top) r = Round (m) y = Cast <to = 2> (r)
        """, 8, 1, 0.001,
    ),
    "upsampling by two": (
        "FPN of Mask R-CNN", "float16[B,256,64,1,64,1] x, float16[B,256,128,128] lateral", "y", """
            wide := int64[6] {1, 1, 1, 2, 1, 2} image := int64[4] {0, 256, 128, 128} e = Expand (x, wide)
            u = Reshape (e, image) y = Add (u, lateral)
        """, 4,
    ),
    "timesteps": (
        "Stable Diffusion UNet, embedding of time", "float[B,1] t, float[160] frequencies", "y", """
            p = Mul (t, frequencies) c = Cos (p) s = Sin (p) j = Concat <axis = 1> (c, s) y = Cast <to = 10> (j)
        """, 2048,
    ),
    "log-mel": (
        "Whisper, spectrogram", "float[B,80,3000] x", "y", """
            least := float {1e-10} ten := float {0.4342944819} eight := float {8} four := float {4} m = Max (x, least)
            l = Log (m) d = Mul (l, ten) top = ReduceMax <axes = [1, 2], keepdims = 1> (d) b = Sub (top, eight)
            c = Max (d, b) a = Add (c, four) y = Div (a, four)
        """, 32,
    ),
    "positional encoding": (
        "NeRF, samples of rays", "float[B,3,1] x, float[10] powers", "y", """
            flat := int64[2] {-1, 60} p = Mul (x, powers) s = Sin (p) c = Cos (p) j = Concat <axis = 2> (s, c)
            y = Reshape (j, flat)
        """, 65536,
    ),
}  # fmt: skip

TEXTS = {**VISION, **LANGUAGE, **GENERATIVE}
