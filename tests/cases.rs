//! Inputs that broke other attention libraries, each with its right result. The number in a name is the report's in the
//! list that the project started from; the report itself is in the comment.

mod common;

use common::*;
use wgpu_attention::ops::attention::alibi_slopes;
use wgpu_attention::*;

fn uniform(batch: u32, len: u32) -> Lengths<'static> {
    Lengths::Uniform { batch, len }
}

fn base(heads: u32, kv_heads: u32, head_dim: u32) -> AttentionDesc {
    AttentionDesc { heads, kv_heads, head_dim, lse: true, ..AttentionDesc::default() }
}

/// Runs every variant family that the adapter has.
fn each(case: impl Fn(&str, &Runtime, AttentionDesc) -> AttentionDesc, test: impl Fn(&str, &Runtime, &AttentionDesc)) {
    for (name, runtime) in runtimes() {
        for variant in [None, Some("portable".to_string())] {
            let desc = case(name, runtime, AttentionDesc { variant: variant.clone(), ..AttentionDesc::default() });
            test(&format!("{name}, variant {variant:?}"), runtime, &desc);
        }
    }
}

fn run(runtime: &Runtime, desc: &AttentionDesc, batch: &Batch, tensors: &Tensors) -> HostOutput {
    block(Attention::new(runtime, desc).unwrap().run(batch, &tensors.input())).unwrap()
}

fn check(what: &str, runtime: &Runtime, desc: &AttentionDesc, batch: &Batch, tensors: &Tensors) -> HostOutput {
    let got = run(runtime, desc, batch, tensors);
    Expected::of(desc, batch, &tensors.input()).check(&got, desc.lse, what);
    got
}

fn over(desc: AttentionDesc) -> impl Fn(&str, &Runtime, AttentionDesc) -> AttentionDesc {
    move |_, _, with| AttentionDesc { variant: with.variant, ..desc.clone() }
}

/// flash-attention 1778: more rows than keys.
#[test]
fn case_1_more_rows_than_keys() {
    each(over(AttentionDesc { causal: true, ..base(1, 1, 8) }), |what, runtime, desc| {
        let batch = Batch::new(desc, uniform(1, 2048), uniform(1, 1024));
        let tensors = Tensors::random(desc, &batch, &mut Data::new(1));
        let got = check(what, runtime, desc, &batch, &tensors);
        assert!(got.out[..1024 * 8].iter().all(|x| *x == 0.0), "{what}");
        assert!(got.lse[..1024].iter().all(|x| *x == f32::NEG_INFINITY), "{what}");
        assert!(got.lse[1024..].iter().all(|x| x.is_finite()), "{what}");
    });
}

/// flashinfer 4452: one key, 34 rows.
#[test]
fn case_2_one_key() {
    each(over(AttentionDesc { causal: true, ..base(32, 8, 128) }), |what, runtime, desc| {
        let batch = Batch::new(desc, uniform(1, 34), uniform(1, 1));
        let tensors =
            Tensors { q: vec![0.0; 34 * 32 * 128], k: vec![0.5; 1024], v: vec![1.0; 1024], ..Tensors::default() };
        let got = run(runtime, desc, &batch, &tensors);
        let (empty, last) = got.out.split_at(33 * 32 * 128);
        assert!(empty.iter().all(|x| *x == 0.0) && last.iter().all(|x| *x == 1.0), "{what}");
        for (i, lse) in got.lse.iter().enumerate() {
            assert_eq!(*lse, if i % 34 == 33 { 0.0 } else { f32::NEG_INFINITY }, "{what}: LSE {i}");
        }
    });
}

/// flashinfer 4401: the last chunk of keys is empty for row 0. Also 1206 and 728: chunks that are no multiple of a tile.
#[test]
fn case_3_a_chunk_that_a_row_does_not_see() {
    each(over(AttentionDesc { causal: true, ..base(2, 1, 16) }), |what, runtime, desc| {
        for kv_len in [129, 257, 385, 511, 513] {
            let batch = Batch::new(desc, uniform(1, 2), uniform(1, kv_len));
            let tensors = Tensors::random(desc, &batch, &mut Data::new(3));
            check(&format!("{what}, {kv_len} keys"), runtime, desc, &batch, &tensors);
        }
    });
}

/// vllm 49294, flash-attention 2842, 2470, 2503, onnxruntime 31611: ragged rows and contexts, empty ones among them.
#[test]
fn cases_7_8_44_ragged_with_empty_sequences() {
    each(over(AttentionDesc { causal: true, ..base(2, 2, 8) }), |what, runtime, desc| {
        for (q, kv) in [
            (&[0u32, 2, 133, 134][..], &[0u32, 4, 4, 7][..]),
            (&[0, 0, 5, 5, 6], &[0, 3, 3, 9, 20]),
            (&[0, 0], &[0, 0]),
            (&[0], &[0]),
            (&[0, 7], &[0, 0]),
        ] {
            let batch = Batch::new(desc, Lengths::Ragged { offsets: q }, Lengths::Ragged { offsets: kv });
            let tensors = Tensors::random(desc, &batch, &mut Data::new(7));
            check(&format!("{what}, {q:?} × {kv:?}"), runtime, desc, &batch, &tensors);
        }
        let nothing = Batch::new(desc, uniform(1, 0), uniform(1, 5));
        assert_eq!(Attention::new(runtime, desc).unwrap().schedule(&nothing).unwrap().dispatches(), 0);
        let nothing = Batch::new(desc, uniform(0, 5), uniform(0, 5));
        assert_eq!(Attention::new(runtime, desc).unwrap().schedule(&nothing).unwrap().dispatches(), 0);
    });
}

/// vllm 936, 30887; flashinfer 942: NaN in keys and values that nobody may see, and in those that some rows do not see.
#[test]
fn case_9_nan_outside_what_is_visible() {
    let desc = AttentionDesc { causal: true, window: Window { left: Some(9), right: None }, ..base(2, 1, 8) };
    each(over(desc), |what, runtime, desc| {
        for (q_len, lens) in [(3, [20u32, 0, 33]), (40, [64, 40, 17])] {
            let batch = Batch::new(desc, uniform(3, q_len), Lengths::Padded { max_len: 64, lens: &lens });
            let clean = Tensors::random(desc, &batch, &mut Data::new(9));
            let mut dirty = clean.clone();
            for (b, len) in lens.iter().enumerate() {
                let first = (*len as i64 - i64::from(q_len) - 9).max(0) as u32;
                for key in (0..64).filter(|key| key >= len || *key < first) {
                    let at = (b * 64 + key as usize) * 8;
                    dirty.k[at..at + 8].fill(f32::NAN);
                    dirty.v[at..at + 8].fill(f32::INFINITY);
                }
            }
            let expected = Expected::of(desc, &batch, &clean.input());
            expected.check(&run(runtime, desc, &batch, &dirty), true, what);
        }
        // A NaN value of the newest key: only the last row sees it, in the same tile as rows that do not.
        let batch = Batch::new(desc, uniform(1, 30), uniform(1, 30));
        let clean = Tensors::random(desc, &batch, &mut Data::new(10));
        let mut dirty = clean.clone();
        dirty.v[29 * 8..].fill(f32::NAN);
        dirty.k[29 * 8..].fill(f32::NAN);
        let (want, got) = (run(runtime, desc, &batch, &clean), run(runtime, desc, &batch, &dirty));
        assert_eq!(got.out[..29 * 16], want.out[..29 * 16], "{what}: rows that do not see the NaN");
        if runtime.caps().keeps_nan {
            assert!(got.out[29 * 16..].iter().all(|x| x.is_nan()), "{what}: the row that does");
        }
    });
}

/// sglang 31501: a window that was not planned is an error, not half a mask. transformers 39408: the conversion of a
/// model's window of W tokens. flash-attention 1133: window (KV − 1, 0) is causal.
#[test]
fn cases_10_11_12_windows() {
    each(over(AttentionDesc { causal: true, ..base(1, 1, 8) }), |what, runtime, desc| {
        let batch = Batch::new(desc, uniform(1, 30), uniform(1, 50));
        let tensors = Tensors::random(desc, &batch, &mut Data::new(12));
        let causal = run(runtime, desc, &batch, &tensors);
        let whole = AttentionDesc { causal: false, window: Window { left: Some(49), right: Some(0) }, ..desc.clone() };
        assert_eq!(run(runtime, &whole, &batch, &tensors), causal, "{what}: window (KV − 1, 0)");
        let huge = AttentionDesc { window: Window { left: Some(u32::MAX), right: Some(u32::MAX) }, ..desc.clone() };
        assert_eq!(run(runtime, &huge, &batch, &tensors), causal, "{what}: sides past every key");

        // W = 8 tokens, the row's own among them: 8 keys of equal score.
        let window = AttentionDesc { window: Window { left: Some(8 - 1), right: Some(0) }, ..desc.clone() };
        let zeros = Tensors { q: vec![0.0; tensors.q.len()], ..tensors.clone() };
        let got = run(runtime, &window, &batch, &zeros);
        assert!(got.lse.iter().all(|lse| (lse - 8f32.ln()).abs() < 1e-6), "{what}: {:?}", got.lse);

        let (planned, other) = (Attention::new(runtime, desc).unwrap(), Attention::new(runtime, &window).unwrap());
        let schedule = planned.schedule(&batch).unwrap();
        let buffer = runtime.buffer("all", 4096, wgpu::BufferUsages::STORAGE).unwrap();
        let out = runtime.buffer("out", 4096, wgpu::BufferUsages::STORAGE).unwrap();
        let lse = runtime.buffer("lse", 4096, wgpu::BufferUsages::STORAGE).unwrap();
        let (q, out, lse) = (View::from(&buffer), View::from(&out), Some(View::from(&lse)));
        let io = AttentionIo { q, k: q, v: q, out, lse, bias: None, mask: None };
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        let error = other.record(&mut encoder, &schedule, &io).unwrap_err();
        assert!(matches!(error, Error::Shape { .. }), "{what}: {error}");
    });
}

/// flashinfer 1148, 1614: group 7. rocm-libraries 12227: group 5 with sinks and an empty split.
#[test]
fn cases_13_20_odd_groups_and_sinks() {
    for (group, sinks) in [(7, false), (5, true), (7, true)] {
        let sinks = sinks.then(|| (0..4 * group).map(|h| h as f32 * 0.3 - 1.0).collect());
        each(over(AttentionDesc { causal: true, sinks, ..base(4 * group, 4, 16) }), |what, runtime, desc| {
            for (q_len, kv_len) in [(1, 300), (3, 260), (6, 4), (20, 33)] {
                let batch = Batch::new(desc, uniform(1, q_len), uniform(1, kv_len));
                let tensors = Tensors::random(desc, &batch, &mut Data::new(13));
                check(&format!("{what}, group {group}, {q_len}×{kv_len}"), runtime, desc, &batch, &tensors);
            }
            // No key at all: O is 0 and the LSE is the sink, or nothing.
            let batch = Batch::new(desc, uniform(1, 2), uniform(1, 0));
            let got = check(what, runtime, desc, &batch, &Tensors::random(desc, &batch, &mut Data::new(14)));
            let want = |head: usize| desc.sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
            assert!(got.lse.iter().enumerate().all(|(i, lse)| *lse == want(i / 2)), "{what}: {:?}", got.lse);
        });
    }
}

/// vllm 945, attention-gym 86: ALiBi at decode: the newest key has bias 0, older ones are negative.
#[test]
fn case_19_alibi_at_decode() {
    each(over(AttentionDesc { alibi: Some(alibi_slopes(3)), ..base(3, 1, 8) }), |what, runtime, desc| {
        let batch = Batch::new(desc, uniform(1, 1), uniform(1, 4));
        let mut tensors = Tensors::random(desc, &batch, &mut Data::new(19));
        tensors.q.fill(0.0);
        let got = check(what, runtime, desc, &batch, &tensors);
        for (head, slope) in alibi_slopes(3).into_iter().enumerate() {
            let sum: f32 = (0..4).map(|distance| (-slope * distance as f32).exp()).sum();
            assert!((got.lse[head] - sum.ln()).abs() < 1e-5, "{what}: head {head}");
        }
    });
}

/// flashinfer 3130, vllm 47671, flashinfer 1271, flash-attention 2214: offsets past 32 bits are refused when planned.
#[test]
fn cases_14_15_16_49_sizes_that_do_not_fit() {
    for (name, runtime) in runtimes() {
        let desc = AttentionDesc { mask: Some(MaskKind::Bits), ..base(8, 8, 128) };
        let attention = Attention::new(runtime, &desc).unwrap();
        let limit = |batch: &Batch, part: &str| match attention.schedule(batch).unwrap_err() {
            Error::Limit { what, limit, value, .. } => assert!(what.contains(part) && value > limit, "{name}: {what}"),
            other => panic!("{name}: {other}"),
        };
        let new = |q, kv| Batch { mask_layout: Some(ScoreLayout::default()), ..Batch::new(&desc, q, kv) };
        let small = new(uniform(1, 1), uniform(1, 10));
        limit(&new(uniform(1, 1), uniform(1, 1 << 23)), " k");
        limit(&Batch { v_layout: Layout { seq: 1 << 40, ..small.v_layout }, ..small }, " v");
        limit(&Batch { v_layout: Layout { seq: u64::MAX, ..small.v_layout }, ..small }, " v");
        limit(&Batch { q_layout: Layout { offset: u64::MAX, ..small.q_layout }, ..small }, " q");
        limit(
            &Batch { mask_layout: Some(ScoreLayout { head: 1 << 32, key: 1, ..Default::default() }), ..small },
            " mask",
        );
        limit(&new(uniform(1, 1), uniform(1, (1 << 30) + 1)), "kv length");
        limit(&new(uniform(1 << 31, 1), uniform(1 << 31, 1)), "q");
    }
}

/// pytorch 141126, 136232: a mask stored larger than the scores; block-sparse equals dense.
#[test]
fn case_30_a_mask_larger_than_the_sequence() {
    each(over(AttentionDesc { mask: Some(MaskKind::Bool), ..base(2, 1, 8) }), |what, runtime, desc| {
        let mut batch = Batch::new(desc, uniform(1, 33), uniform(1, 47));
        batch.mask_layout = Some(ScoreLayout { offset: 5, batch: 0, head: 0, row: 64, key: 1 });
        let mut tensors = Tensors::random(desc, &batch, &mut Data::new(30));
        // Blocks of 16 × 16, some visible.
        let mask =
            (0..5 + 64 * 64).map(|i: u32| u8::from((i.saturating_sub(5) / 1024 + i % 64 / 16).is_multiple_of(2)));
        tensors.bool_mask = Some(mask.collect());
        check(what, runtime, desc, &batch, &tensors);
    });
}

/// onnxruntime 26367, 26732, llama.cpp 25748, onnxruntime 31626: f16 inputs whose products pass 65504, logits of ±10⁵.
#[test]
fn cases_37_38_large_logits() {
    for dtype in [DType::F16, DType::F32] {
        let types = AttentionDesc { q_dtype: dtype, kv_dtype: dtype, ..base(1, 1, 16) };
        each(over(AttentionDesc { scale: Some(1.0), ..types }), |what, runtime, desc| {
            for (q_len, kv_len) in [(5, 40), (20, 300), (2, 600)] {
                let batch = Batch::new(desc, uniform(1, q_len), uniform(1, kv_len));
                let mut tensors = Tensors::random(desc, &batch, &mut Data::new(37));
                tensors.q.iter_mut().for_each(|x| *x = dtype.round(*x * 300.0));
                tensors.k.iter_mut().for_each(|x| *x = dtype.round(*x * 300.0));
                let got = check(&format!("{what}, {dtype}, {q_len}×{kv_len}"), runtime, desc, &batch, &tensors);
                assert!(got.lse.iter().any(|lse| *lse > 65504.0), "{what}: this is to test large logits");
            }
        });
    }
    // Rising scores: every step has a new maximum.
    each(over(AttentionDesc { scale: Some(1.0), ..base(1, 1, 4) }), |what, runtime, desc| {
        let batch = Batch::new(desc, uniform(1, 20), uniform(1, 500));
        let mut tensors = Tensors::random(desc, &batch, &mut Data::new(38));
        tensors.q.iter_mut().for_each(|x| *x = x.abs() + 0.5);
        tensors.k.iter_mut().enumerate().for_each(|(i, x)| *x = (i / 4) as f32 * 200.0 - 5e4);
        check(what, runtime, desc, &batch, &tensors);
        let batch = Batch::new(desc, uniform(1, 1), uniform(1, 500));
        let tensors = Tensors { q: tensors.q[..4].to_vec(), ..tensors };
        check(what, runtime, desc, &batch, &tensors);
    });
}

/// gpuweb 2311, wgpu-py 620, cubecl 1070, onnxruntime 28904, rten 1321: −∞ in a bias is a mask, −3.4e38 is not; a row
/// that sees nothing is zero, not NaN and not the mean of V.
#[test]
fn cases_39_41_minus_infinity_and_the_lowest_number() {
    for dtype in DType::ALL {
        each(over(AttentionDesc { bias: Some(dtype), ..base(1, 1, 8) }), |what, runtime, desc| {
            for kv_len in [9, 300] {
                let mut batch = Batch::new(desc, uniform(1, 3), uniform(1, kv_len));
                let mut tensors = Tensors::random(desc, &batch, &mut Data::new(39));
                batch.bias_layout = ScoreLayout::broadcast(&[3, 1], [1, 1, 3, kv_len]);
                let lowest = if dtype == DType::F16 { -65504.0 } else { dtype.round(-3.3e38) };
                tensors.bias = Some(vec![f32::NEG_INFINITY, lowest, 0.0]);
                let got = check(&format!("{what}, {dtype}"), runtime, desc, &batch, &tensors);
                assert!(got.out[..8].iter().all(|x| *x == 0.0) && got.lse[0] == f32::NEG_INFINITY, "{what}");
                if dtype == DType::F32 {
                    for d in 0..8 {
                        let mean = tensors.v.iter().skip(d).step_by(8).sum::<f32>() / kv_len as f32;
                        assert!((got.out[8 + d] - mean).abs() < 1e-5, "{what}: mean of V");
                    }
                }
            }
            // The very lowest f32 as a bias, where adding a score overflows.
            if dtype == DType::F32 {
                let mut batch = Batch::new(desc, uniform(1, 1), uniform(1, 7));
                let mut tensors = Tensors::random(desc, &batch, &mut Data::new(40));
                tensors.k.iter_mut().for_each(|x| *x *= 1e18);
                tensors.q.iter_mut().for_each(|x| *x *= 1e17);
                batch.bias_layout = ScoreLayout::broadcast(&[1], [1, 1, 1, 7]);
                tensors.bias = Some(vec![f32::MIN]);
                check(&format!("{what}, lowest"), runtime, desc, &batch, &tensors);
            }
        });
    }
}

/// rlevo 1044, lattice 790: one NaN rule: NaN stays in its own row, whatever it came from; ∞ among the scores gives NaN, as
/// in plain arithmetic, and −∞ the lowest score.
#[test]
fn case_40_nan_in_visible_places() {
    for softcap in [None, Some(5.0)] {
        each(over(AttentionDesc { softcap, bias: Some(DType::F32), ..base(2, 1, 8) }), |what, runtime, desc| {
            for with_bias in [true, false] {
                let desc = AttentionDesc { bias: desc.bias.filter(|_| with_bias), ..desc.clone() };
                for (q_len, kv_len) in [(5, 20), (40, 40), (1, 400)] {
                    for (turn, value) in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate()
                    {
                        let mut batch = Batch::new(&desc, uniform(1, q_len), uniform(1, kv_len));
                        let mut tensors = Tensors::random(&desc, &batch, &mut Data::new(40));
                        if with_bias {
                            batch.bias_layout = ScoreLayout::broadcast(&[kv_len], [1, 2, q_len, kv_len]);
                            tensors.bias = Some(vec![0.5; kv_len as usize]);
                        }
                        tensors.q[3] = value; // row 0, head 0
                        tensors.k.iter_mut().skip(3).step_by(8).for_each(|x| *x = x.abs() + 0.1);
                        let got = run(runtime, &desc, &batch, &tensors);
                        if runtime.caps().keeps_nan {
                            let expected = Expected::of(&desc, &batch, &tensors.input());
                            expected.check(
                                &got,
                                true,
                                &format!("{what}, softcap {softcap:?}, bias {with_bias}, turn {turn}"),
                            );
                        }
                        assert!(got.out[8..].iter().all(|x| x.is_finite()), "{what}: NaN went to another row");
                    }
                }
                // A bias that is NaN for one row.
                if with_bias && runtime.caps().keeps_nan {
                    let mut batch = Batch::new(&desc, uniform(1, 9), uniform(1, 30));
                    let mut tensors = Tensors::random(&desc, &batch, &mut Data::new(41));
                    batch.bias_layout = ScoreLayout::broadcast(&[9, 1], [1, 2, 9, 30]);
                    tensors.bias = Some((0..9).map(|row| if row == 4 { f32::NAN } else { 0.0 }).collect());
                    check(what, runtime, &desc, &batch, &tensors);
                }
            }
        });
    }
}

/// burn 4778: every broadcast of a bias. onnxruntime 26766, 26715: rows {1, 3, 16} after {0, 16, 64} earlier tokens.
#[test]
fn cases_42_43_bias_shapes_and_past() {
    for with_bias in [false, true] {
        let bias = with_bias.then_some(DType::F32);
        each(over(AttentionDesc { bias, causal: true, ..base(4, 2, 8) }), |what, runtime, desc| {
            for (turn, (rows, past)) in [(1, 0), (3, 16), (16, 64), (16, 0), (3, 64)].into_iter().enumerate() {
                let (q_len, kv_len) = (rows, rows + past);
                for shape in 0..if with_bias { 16u32 } else { 1 } {
                    let mut batch = Batch::new(desc, uniform(2, q_len), uniform(2, kv_len));
                    let mut data = Data::new(42 + turn as u64);
                    let mut tensors = Tensors::random(desc, &batch, &mut data);
                    if with_bias {
                        let full = [2, 4, q_len, kv_len];
                        let dims: Vec<u32> = (0..4).map(|i| if shape >> i & 1 == 1 { full[i] } else { 1 }).collect();
                        batch.bias_layout = ScoreLayout::broadcast(&dims, full);
                        tensors.bias = Some(data.tensor(dims.iter().product::<u32>() as usize, DType::F32));
                    }
                    check(&format!("{what}, {q_len}×{kv_len}, shape {shape:04b}"), runtime, desc, &batch, &tensors);
                }
            }
        });
    }
}

/// burn 4325, 4966, 4355; SageAttention 26, 19: odd head dims, tails, many rows, rows ≠ keys.
#[test]
fn cases_29_45_odd_sizes() {
    each(over(base(1, 1, 4)), |what, runtime, desc| {
        for (q_len, kv_len, head_dim, v_dim) in
            [(500, 3, 1, 1), (7, 501, 3, 2), (513, 65, 33, 31), (33, 97, 65, 67), (127, 255, 7, 5)]
        {
            let desc = AttentionDesc { head_dim, v_head_dim: Some(v_dim), ..desc.clone() };
            let batch = Batch::new(&desc, uniform(1, q_len), uniform(1, kv_len));
            let tensors = Tensors::random(&desc, &batch, &mut Data::new(45));
            check(&format!("{what}, {q_len}×{kv_len}, dims {head_dim}, {v_dim}"), runtime, &desc, &batch, &tensors);
        }
    });
}

/// wllama 229, mlc-llm 838, cubek 119, llama.cpp 23844: a device at WebGPU's default limits and no features runs every
/// size and every type.
#[test]
fn cases_47_50_default_limits() {
    for adapter in block(adapters()) {
        let name = short_name(&adapter.get_info());
        let descriptor = wgpu::DeviceDescriptor { required_limits: wgpu::Limits::default(), ..Default::default() };
        let (device, queue) = block(adapter.request_device(&descriptor)).unwrap();
        let runtime = block(Runtime::new(device, queue, RuntimeOptions::default())).unwrap();
        for (head_dim, v_dim, dtype) in [(64, 64, DType::F16), (576, 512, DType::Bf16), (40, 200, DType::F32)] {
            let types = AttentionDesc { q_dtype: dtype, kv_dtype: dtype, out_dtype: dtype, ..base(2, 1, head_dim) };
            let desc = AttentionDesc {
                v_head_dim: Some(v_dim),
                causal: true,
                bias: Some(dtype),
                mask: Some(MaskKind::Bits),
                ..types
            };
            let mut batch = Batch::new(&desc, uniform(1, 20), uniform(1, 40));
            let mut tensors = Tensors::random(&desc, &batch, &mut Data::new(47));
            batch.mask_layout = ScoreLayout::broadcast_bits(&[40], [1, 2, 20, 40]);
            batch.bias_layout = ScoreLayout::broadcast(&[40], [1, 2, 20, 40]);
            tensors.bit_mask = Some(vec![0xffff_0fff, 0xff]);
            tensors.bias = Some(Data::new(48).tensor(40, dtype));
            let what = format!("{name}, {head_dim}, {v_dim}, {dtype}");
            assert_eq!(
                runtime.caps().limits.max_storage_buffers_per_shader_stage,
                8,
                "this is to test 8 storage buffers"
            );
            check(&what, &runtime, &desc, &batch, &tensors);
        }
    }
}

/// cubecl 788: less workgroup memory than a tile needs: another variant, or a typed refusal.
#[test]
fn case_48_little_workgroup_memory() {
    for (name, runtime) in runtimes() {
        for bytes in [1 << 10, 8 << 10, 11 << 10, 16 << 10] {
            let mask = CapsMask { workgroup_bytes: Some(bytes), ..CapsMask::default() };
            let options = RuntimeOptions { mask, verdicts: Some(runtime.verdicts()), ..RuntimeOptions::default() };
            let small = block(Runtime::new(runtime.device().clone(), runtime.queue().clone(), options)).unwrap();
            let desc = base(1, 1, 32);
            match Attention::new(&small, &desc) {
                Ok(_) => {
                    let batch = Batch::new(&desc, uniform(1, 40), uniform(1, 40));
                    check(name, &small, &desc, &batch, &Tensors::random(&desc, &batch, &mut Data::new(48)));
                    assert!(bytes > 1 << 10, "{name}: no tile fits in {bytes} bytes");
                }
                Err(Error::Unsupported { .. }) => assert!(bytes < 16 << 10, "{name}: portable rows fit in 16 KiB"),
                Err(other) => panic!("{name}: {other}"),
            }
        }
    }
}

/// 10⁵ equal keys: the sum is right.
#[test]
fn many_equal_keys() {
    for (name, runtime) in runtimes() {
        let desc = base(1, 1, 4);
        let batch = Batch::new(&desc, uniform(1, 1), uniform(1, 100_000));
        let mut tensors = Tensors::random(&desc, &batch, &mut Data::new(50));
        tensors.k.fill(0.25);
        let got = run(runtime, &desc, &batch, &tensors);
        assert!(
            (f64::from(got.lse[0]) - (f64::from(0.125f32 * tensors.q.iter().sum::<f32>()) + 1e5f64.ln())).abs() < 1e-4,
            "{name}"
        );
        for d in 0..4 {
            let mean = tensors.v.iter().skip(d).step_by(4).map(|x| f64::from(*x)).sum::<f64>() / 1e5;
            assert!((f64::from(got.out[d]) - mean).abs() < 1e-5, "{name}: {} is not {mean}", got.out[d]);
        }
    }
}

/// f16 at the ends of its range: subnormals, the largest number, values of f32 V too large for an f16 O.
#[test]
fn ends_of_the_f16_range() {
    each(
        over(AttentionDesc { kv_dtype: DType::F16, out_dtype: DType::F16, ..base(1, 1, 4) }),
        |what, runtime, desc| {
            let batch = Batch::new(desc, uniform(1, 4), uniform(1, 1));
            for v in [6e-8f32, 3.1e-5, 6.1e-5, 65504.0, -65504.0, 1e-3] {
                let v = DType::F16.round(v);
                let tensors = Tensors { q: vec![0.5; 16], k: vec![0.5; 4], v: vec![v; 4], ..Tensors::default() };
                let got = run(runtime, desc, &batch, &tensors);
                assert!(got.out.iter().all(|x| *x == v), "{what}: {v} came out as {}", got.out[0]);
            }
            let desc = AttentionDesc { kv_dtype: DType::F32, ..desc.clone() };
            let tensors = Tensors {
                q: vec![0.5; 16],
                k: vec![0.5; 4],
                v: vec![1e6, -1e6, 65510.0, f32::NAN],
                ..Tensors::default()
            };
            let got = run(runtime, &desc, &batch, &tensors);
            assert_eq!(got.out[..3], [f32::INFINITY, f32::NEG_INFINITY, 65504.0], "{what}");
            assert!(got.out[3].is_nan() || !runtime.caps().keeps_nan, "{what}");
        },
    );
}

/// Sinks far above all scores, and far below.
#[test]
fn large_sinks() {
    each(over(AttentionDesc { sinks: Some(vec![200.0, 1000.0, -1000.0]), ..base(3, 1, 8) }), |what, runtime, desc| {
        for kv_len in [20, 400] {
            let batch = Batch::new(desc, uniform(1, 3), uniform(1, kv_len));
            check(what, runtime, desc, &batch, &Tensors::random(desc, &batch, &mut Data::new(60)));
        }
    });
}

/// Sums that all fall below the lowest number are equal: the mean of V. One key far above 10⁴ others.
#[test]
fn lowest_sums_and_one_dominant_key() {
    each(over(AttentionDesc { bias: Some(DType::F32), scale: Some(1.0), ..base(1, 1, 4) }), |what, runtime, desc| {
        for kv_len in [30, 500] {
            let mut batch = Batch::new(desc, uniform(1, 2), uniform(1, kv_len));
            let mut tensors = Tensors::random(desc, &batch, &mut Data::new(61));
            tensors.q.fill(1e18);
            tensors.k.iter_mut().enumerate().for_each(|(i, x)| *x = -1e19 - i as f32 * 1e16);
            batch.bias_layout = ScoreLayout::broadcast(&[1], [1, 1, 2, kv_len]);
            tensors.bias = Some(vec![f32::MIN]);
            let got = check(what, runtime, desc, &batch, &tensors);
            let mean = tensors.v.iter().step_by(4).sum::<f32>() / kv_len as f32;
            assert!((got.out[0] - mean).abs() < 1e-5, "{what}: {} is not {mean}", got.out[0]);
        }
        let mut batch = Batch::new(desc, uniform(1, 1), uniform(1, 10_000));
        let mut tensors = Tensors::random(desc, &batch, &mut Data::new(62));
        batch.bias_layout = ScoreLayout::broadcast(&[10_000], [1, 1, 1, 10_000]);
        tensors.bias = Some((0..10_000).map(|key| if key == 4711 { 50.0 } else { 0.0 }).collect());
        check(what, runtime, desc, &batch, &tensors);
    });
}

/// Positions at the ends of what is allowed, where sums come close to 2³¹.
#[test]
fn extreme_positions() {
    let far = 1 << 29;
    for (start, left, right) in [
        (far, None, Some((1 << 30) - 1)),
        (far, Some(far as u32), None),
        (far, Some(far as u32 - 10), None),
        (-far, None, Some(far as u32)),
        (-far, None, Some(far as u32 + 5)),
        (-far, Some(3), Some((1 << 30) - 1)),
        (far, Some((1 << 30) - 1), Some((1 << 30) - 1)),
    ] {
        each(over(AttentionDesc { window: Window { left, right }, ..base(1, 1, 4) }), |what, runtime, desc| {
            let starts = [start];
            let batch = Batch { start: Start::Explicit(&starts), ..Batch::new(desc, uniform(1, 8), uniform(1, 16)) };
            let tensors = Tensors::random(desc, &batch, &mut Data::new(63));
            check(&format!("{what}, start {start}, {left:?}, {right:?}"), runtime, desc, &batch, &tensors);
        });
    }
}

/// A bit mask has a stride of 0 or 1 along its keys: others would be read far outside.
#[test]
fn bit_masks_with_other_strides_are_refused() {
    let (_, runtime) = &runtimes()[0];
    let desc = AttentionDesc { mask: Some(MaskKind::Bits), ..base(1, 1, 4) };
    let attention = Attention::new(runtime, &desc).unwrap();
    for key in [2, 1000, 1 << 29] {
        let layout = Some(ScoreLayout { key, ..ScoreLayout::default() });
        let batch = Batch { mask_layout: layout, ..Batch::new(&desc, uniform(1, 1), uniform(1, 20)) };
        assert!(attention.schedule(&batch).unwrap_err().to_string().contains("0 or 1"));
    }
    let missing = Batch::new(&desc, uniform(1, 1), uniform(1, 20));
    assert!(attention.schedule(&missing).unwrap_err().to_string().contains("mask_layout"));
}

/// Host slices shorter than the batch says are refused, not read as zeros.
#[test]
fn short_slices_are_refused() {
    let (_, runtime) = &runtimes()[0];
    let desc = AttentionDesc { mask: Some(MaskKind::Bool), ..base(1, 1, 4) };
    let attention = Attention::new(runtime, &desc).unwrap();
    let layout = ScoreLayout::broadcast(&[2, 3], [1, 1, 2, 3]);
    let batch = Batch { mask_layout: layout, ..Batch::new(&desc, uniform(1, 2), uniform(1, 3)) };
    let (q, k, mask) = ([0.0; 8], [0.0; 12], [1u8; 6]);
    let run = |q: &[f32], k: &[f32], mask: &[u8]| {
        let input = HostInput { q, k, v: k, bias: None, mask: HostMask::Bool(mask) };
        block(attention.run(&batch, &input)).map_err(|error| error.to_string())
    };
    run(&q, &k, &mask).unwrap();
    assert!(run(&q[1..], &k, &mask).unwrap_err().contains("q: expected at least 8"));
    assert!(run(&q, &k[1..], &mask).unwrap_err().contains("k: expected at least 12"));
    assert!(run(&q, &k, &mask[1..]).unwrap_err().contains("mask: expected at least 6"));
}
