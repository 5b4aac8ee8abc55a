//! Every operation, every variant an adapter can run, against the f64 oracle, on every adapter there is.
//! `every_variant_over_shapes` writes the matrix operation × variant × adapter.

mod common;

use common::*;
use wgpu_attention::ops::attention::{self, alibi_slopes};
use wgpu_attention::*;

fn uniform(batch: u32, len: u32) -> Lengths<'static> {
    Lengths::Uniform { batch, len }
}

fn check(
    name: &str,
    runtime: &Runtime,
    desc: &AttentionDesc,
    batch: &Batch,
    tensors: &Tensors,
    what: &str,
) -> HostOutput {
    let expected = Expected::of(desc, batch, &tensors.input());
    check_against(name, runtime, desc, batch, tensors, &expected, what)
}

fn check_against(
    name: &str,
    runtime: &Runtime,
    desc: &AttentionDesc,
    batch: &Batch,
    tensors: &Tensors,
    expected: &Expected,
    what: &str,
) -> HostOutput {
    let attention = Attention::new(runtime, desc).unwrap_or_else(|error| panic!("{name}: {what}: {error}"));
    let got = block(attention.run(batch, &tensors.input())).unwrap_or_else(|error| panic!("{name}: {what}: {error}"));
    expected.check(&got, desc.lse, &format!("{name}: {:?}: {what}", attention.variants()));
    got
}

/// Shapes around every tile edge: (q_len, kv_len, heads, kv_heads, head_dim, v_head_dim).
const SHAPES: &[(u32, u32, u32, u32, u32, u32)] = &[
    (1, 1, 1, 1, 4, 4),
    (1, 0, 2, 1, 8, 8),
    (0, 5, 2, 1, 8, 8),
    (2, 129, 2, 2, 16, 16),
    (15, 31, 1, 1, 8, 8),
    (16, 32, 1, 1, 8, 32),
    (17, 33, 1, 1, 24, 28),
    (31, 63, 2, 1, 8, 12),
    (63, 64, 1, 1, 12, 8),
    (64, 65, 1, 1, 8, 8),
    (65, 66, 1, 1, 16, 20),
    (130, 127, 1, 1, 8, 8),
    (3, 40, 14, 2, 8, 8),  // group 7
    (5, 200, 5, 1, 20, 8), // group 5
    (70, 20, 2, 2, 8, 8),  // rows without keys under causal
    (1, 700, 4, 1, 8, 8),  // split keys
    (2, 1500, 7, 1, 36, 32),
    (20, 64, 3, 3, 64, 64),
    (9, 90, 2, 1, 80, 100),
    (7, 50, 1, 1, 128, 128),
    (10, 70, 1, 1, 64, 192),
    (6, 70, 1, 1, 576, 512),
];

/// Score options in turn; each is a uniform flag, so no pipeline is added.
fn with_options(mut desc: AttentionDesc, turn: usize) -> AttentionDesc {
    let heads = desc.heads;
    desc.causal = turn % 3 == 1;
    desc.window = match turn % 5 {
        1 => Window { left: Some(0), right: Some(0) },
        2 => Window { left: Some(13), right: None },
        3 => Window { left: None, right: Some(7) },
        4 => Window { left: Some(40), right: Some(3) },
        _ => Window::default(),
    };
    desc.softcap = (turn % 4 == 2).then_some(3.0);
    desc.alibi = (turn % 4 == 3).then(|| alibi_slopes(heads));
    desc.sinks = (turn % 7 == 4).then(|| (0..heads).map(|h| h as f32 - 1.5).collect());
    desc.scale = (turn % 6 == 5).then_some(-0.3);
    desc
}

#[test]
fn every_variant_over_shapes() {
    let mut matrix = Vec::new();
    for (name, runtime) in runtimes() {
        for row in attention::variants() {
            let mut ran = 0;
            let mut lacking = String::new();
            for (turn, &(q_len, kv_len, heads, kv_heads, head_dim, v_head_dim)) in SHAPES.iter().enumerate() {
                let desc = AttentionDesc {
                    heads,
                    kv_heads,
                    head_dim,
                    v_head_dim: Some(v_head_dim),
                    lse: true,
                    ..AttentionDesc::default()
                };
                if let Some(reason) = attention::out_reason(runtime, &desc, &row) {
                    lacking = reason;
                    continue;
                }
                for turn in [turn, turn + 8, 3 * turn + 1] {
                    let desc = AttentionDesc { variant: Some(row.name.into()), ..with_options(desc.clone(), turn) };
                    let batch = Batch::new(&desc, uniform(2, q_len), uniform(2, kv_len));
                    let tensors = Tensors::random(&desc, &batch, &mut Data::new(turn as u64));
                    check(name, runtime, &desc, &batch, &tensors, &format!("{q_len}×{kv_len}, turn {turn}"));
                    ran += 1;
                }
            }
            matrix.push(match ran {
                0 => format!("attention × {} × {name}: out: {lacking}", row.name),
                ran => format!("attention × {} × {name}: ok ({ran} cases)", row.name),
            });
            let serves = runtime.caps().has(&row.needs).is_ok();
            assert_eq!(ran > 0, serves, "{name}: {}: {lacking}", row.name);
        }
    }
    // `./dev test` shows it at the end; a folder that is not there (a binary run elsewhere) is no failure.
    let names: Vec<_> = runtimes().iter().map(|(name, _)| name.as_str()).collect();
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("matrix-{}.txt", names.join("-")));
    let _ = std::fs::write(file, matrix.join("\n") + "\n");
    println!("{}", matrix.join("\n"));
}

/// Link-time options: storage of Q, K/V, O, whether rows are multiples of four elements, bias, mask, LSE. A covering
/// array: every pair of values of two columns stands in some row.
type Config = (DType, DType, DType, bool, Option<DType>, Option<MaskKind>, bool);

const CONFIGS: &[Config] = {
    use DType::{Bf16, F16, F32};
    use MaskKind::{Bits, Bool};
    &[
        (F32, F32, F32, true, None, None, true),
        (F32, F16, Bf16, false, Some(F32), Some(Bool), true),
        (F32, Bf16, F16, true, Some(F16), Some(Bits), false),
        (F16, F32, F16, false, Some(Bf16), None, true),
        (F16, F16, F16, true, None, Some(Bool), true),
        (F16, F16, F32, false, Some(F16), Some(Bits), false),
        (F16, Bf16, Bf16, true, Some(F32), None, false),
        (Bf16, F32, Bf16, true, Some(F16), Some(Bool), false),
        (Bf16, F16, F32, true, Some(Bf16), Some(Bits), true),
        (Bf16, Bf16, Bf16, false, None, Some(Bits), true),
        (Bf16, Bf16, F16, false, Some(F32), Some(Bool), false),
        (F32, F32, F16, false, Some(Bf16), Some(Bits), true),
        (F32, Bf16, F32, false, Some(Bf16), None, false),
        (F16, F32, F32, true, Some(F32), Some(Bool), true),
        (Bf16, F32, F16, true, None, None, false),
        (F32, F16, F16, true, Some(F16), None, true),
    ]
};

/// Draws a bias, and a mask with about a quarter hidden, of broadcast shapes.
fn add_bias_and_mask(desc: &AttentionDesc, batch: &mut Batch, tensors: &mut Tensors, data: &mut Data) {
    let longest = |lengths: &Lengths| (0..lengths.batch()).map(|b| lengths.len(b)).max().unwrap_or(0);
    let scores = [batch.q.batch() as u32, desc.heads, longest(&batch.q), longest(&batch.kv)];
    let shape = |data: &mut Data| scores.map(|len| if len > 0 && data.below(3) == 0 { 1 } else { len });
    let count = |shape: &[u32; 4]| shape.iter().product::<u32>() as usize;
    if let Some(dtype) = desc.bias {
        let shape = shape(data);
        let mut bias = data.tensor(count(&shape), dtype);
        for value in bias.iter_mut().step_by(11) {
            *value = f32::NEG_INFINITY;
        }
        batch.bias_layout = ScoreLayout::broadcast(&shape, scores);
        tensors.bias = Some(bias);
    }
    let shape = shape(data);
    match desc.mask {
        Some(MaskKind::Bool) => {
            batch.mask_layout = ScoreLayout::broadcast(&shape, scores);
            tensors.bool_mask = Some((0..count(&shape)).map(|_| data.below(4) as u8).collect());
        }
        Some(MaskKind::Bits) => {
            batch.mask_layout = ScoreLayout::broadcast_bits(&shape, scores);
            let words = shape[0] * shape[1] * shape[2] * shape[3].div_ceil(32);
            tensors.bit_mask = Some((0..words).map(|_| data.below(u32::MAX) | data.below(u32::MAX)).collect());
        }
        None => {}
    }
}

#[test]
fn storage_types_alignment_bias_and_masks() {
    for (name, runtime) in runtimes() {
        for (turn, &(q, kv, out, fours, bias, mask, lse)) in CONFIGS.iter().enumerate() {
            for (q_len, kv_len, batches) in [(3, 45, 2), (40, 70, 1), (2, 600, 1)] {
                let desc = AttentionDesc {
                    heads: 6,
                    kv_heads: 2,
                    head_dim: if fours { 24 } else { 23 },
                    v_head_dim: Some(if fours { 12 } else { 13 }),
                    q_dtype: q,
                    kv_dtype: kv,
                    out_dtype: out,
                    bias,
                    mask,
                    lse,
                    ..AttentionDesc::default()
                };
                let desc = with_options(desc, turn + q_len as usize);
                let mut data = Data::new(100 + turn as u64);
                let mut batch = Batch::new(&desc, uniform(batches, q_len), uniform(batches, kv_len));
                let mut tensors = Tensors::random(&desc, &batch, &mut data);
                add_bias_and_mask(&desc, &mut batch, &mut tensors, &mut data);
                check(name, runtime, &desc, &batch, &tensors, &format!("config {turn}, {q_len}×{kv_len}"));
            }
        }
    }
}

/// The pipelines of a run stay few: what can be a flag is a flag.
#[test]
fn random_descriptors() {
    let cases = std::env::var("WGPU_ATTENTION_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    for (name, runtime) in runtimes() {
        for seed in 0..cases {
            let mut data = Data::new(1000 + seed);
            let (q, kv, out, fours, bias, mask, lse) = data.pick(&CONFIGS[..6]);
            let kv_heads = 1 + data.below(3);
            let dim = |data: &mut Data| if fours { 4 * (1 + data.below(8)) } else { 1 + data.below(32) };
            let desc = AttentionDesc {
                heads: kv_heads * (1 + data.below(7)),
                kv_heads,
                head_dim: dim(&mut data),
                v_head_dim: Some(dim(&mut data)),
                q_dtype: q,
                kv_dtype: kv,
                out_dtype: out,
                bias,
                mask,
                lse,
                ..AttentionDesc::default()
            };
            let desc = with_options(desc, data.below(420) as usize);
            let count = data.below(4) as usize;
            let lens = |data: &mut Data, max: u32| (0..count).map(|_| data.below(max)).collect::<Vec<u32>>();
            let (q_lens, kv_lens) = (lens(&mut data, 40), lens(&mut data, 150));
            let offsets = |lens: &[u32]| {
                let ends = lens.iter().scan(0, |at, len| {
                    *at += len;
                    Some(*at)
                });
                std::iter::once(0).chain(ends).collect::<Vec<u32>>()
            };
            let (q_offsets, kv_offsets) = (offsets(&q_lens), offsets(&kv_lens));
            let q = match data.below(2) {
                0 => Lengths::Padded { max_len: 41, lens: &q_lens },
                _ => Lengths::Ragged { offsets: &q_offsets },
            };
            let kv = match data.below(2) {
                0 => Lengths::Padded { max_len: 150, lens: &kv_lens },
                _ => Lengths::Ragged { offsets: &kv_offsets },
            };
            let starts: Vec<i32> = (0..count).map(|_| data.below(200) as i32 - 60).collect();
            let mut batch = Batch::new(&desc, q, kv);
            batch.start = match data.below(3) {
                0 => Start::BottomRight,
                1 => Start::TopLeft,
                _ => Start::Explicit(&starts),
            };
            let mut tensors = Tensors::random(&desc, &batch, &mut data);
            add_bias_and_mask(&desc, &mut batch, &mut tensors, &mut data);
            check(name, runtime, &desc, &batch, &tensors, &format!("seed {seed}"));
        }
        // 2 forms × whole and split × 6 configurations and 2 merges each would be 36; rows and widths of the other tests come on top.
        assert!(runtime.pipeline_count() < 220, "{name}: {} pipelines", runtime.pipeline_count());
    }
}

#[test]
fn layouts_and_interleaved_keys_and_values() {
    for (name, runtime) in runtimes() {
        let desc = AttentionDesc { heads: 4, kv_heads: 2, head_dim: 8, lse: true, causal: true, ..Default::default() };
        let (q_len, kv_len) = (21, 50);
        let plain = Batch::new(&desc, uniform(2, q_len), uniform(2, kv_len));
        let tensors = Tensors::random(&desc, &plain, &mut Data::new(5));
        let want = check(name, runtime, &desc, &plain, &tensors, "bshd");

        // The same tensors as [batch, head, seq, dim].
        let turned = |x: &[f32], len: u32, heads: u32| {
            let (from, to) = (Layout::bshd(len, heads, 8), Layout::bhsd(len, heads, 8));
            let mut out = vec![0.0; x.len()];
            for (b, s, h) in (0..2).flat_map(|b| (0..len).flat_map(move |s| (0..heads).map(move |h| (b, s, h)))) {
                let at = |layout: &Layout| {
                    (b * layout.batch + u64::from(s) * layout.seq + u64::from(h) * layout.head) as usize
                };
                out[at(&to)..at(&to) + 8].copy_from_slice(&x[at(&from)..at(&from) + 8]);
            }
            out
        };
        let bhsd = Batch {
            q_layout: Layout::bhsd(q_len, 4, 8),
            k_layout: Layout::bhsd(kv_len, 2, 8),
            v_layout: Layout::bhsd(kv_len, 2, 8),
            out_layout: Layout::bhsd(q_len, 4, 8),
            ..plain
        };
        let (k, v) = (turned(&tensors.k, kv_len, 2), turned(&tensors.v, kv_len, 2));
        let other = Tensors { q: turned(&tensors.q, q_len, 4), k, v, ..Tensors::default() };
        let got = check(name, runtime, &desc, &bhsd, &other, "bhsd");
        assert_eq!(got.out, turned(&want.out, q_len, 4), "{name}: the same bits in another order");
        assert_eq!(got.lse, want.lse);

        // K and V of a token side by side in one buffer, after three elements of something else: odd offsets.
        for first in [0usize, 3] {
            let mut both = vec![f32::NAN; first];
            for (k, v) in tensors.k.chunks(16).zip(tensors.v.chunks(16)) {
                both.extend_from_slice(k);
                both.extend_from_slice(v);
            }
            let layout = |offset: usize| Layout { offset: (first + offset) as u64, batch: 32 * 50, seq: 32, head: 8 };
            let batch = Batch { k_layout: layout(0), v_layout: layout(16), ..plain };
            let tensors = Tensors { k: both.clone(), v: both, ..tensors.clone() };
            let got = check(name, runtime, &desc, &batch, &tensors, "interleaved");
            assert_eq!(got.out, want.out);
        }
    }
}

/// 16-bit rows of odd length: halves of one word belong to different rows, and the other half is left alone.
#[test]
fn odd_rows_of_halves_leave_their_neighbours() {
    for (name, runtime) in runtimes() {
        for dtype in [DType::F16, DType::Bf16] {
            let desc = AttentionDesc {
                heads: 3,
                kv_heads: 3,
                head_dim: 5,
                v_head_dim: Some(7),
                out_dtype: dtype,
                ..Default::default()
            };
            let mut batch = Batch::new(&desc, uniform(1, 33), uniform(1, 9));
            // Rows of 9 elements with 7 used: the two between, and the first, keep their bits.
            batch.out_layout = Layout { offset: 1, batch: 0, seq: 27, head: 9 };
            let tensors = Tensors::random(&desc, &batch, &mut Data::new(8));
            let attention = Attention::new(runtime, &desc).unwrap();
            let schedule = attention.schedule(&batch).unwrap();
            let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
            let up = |x: &[f32]| runtime.upload("in", &DType::F32.encode(x), storage).unwrap();
            let (q, k, v) = (up(&tensors.q), up(&tensors.k), up(&tensors.v));
            let canary = vec![0xabu8; 2 * 900];
            let out = runtime.upload("out", &canary, storage).unwrap();
            let io = AttentionIo {
                q: (&q).into(),
                k: (&k).into(),
                v: (&v).into(),
                out: (&out).into(),
                lse: None,
                bias: None,
                mask: None,
            };
            let mut encoder = runtime.device().create_command_encoder(&Default::default());
            attention.record(&mut encoder, &schedule, &io).unwrap();
            runtime.queue().submit([encoder.finish()]);
            let bytes = block(runtime.read(&out, 1800)).unwrap();
            let expected = Expected::of(&desc, &batch, &tensors.input());
            let got = dtype.decode(&bytes, expected.out.len());
            for i in 0..900usize {
                let inside = i >= 1 && (i - 1) % 9 < 7 && (i - 1) / 9 < 99;
                match inside {
                    false => {
                        assert_eq!(bytes[2 * i..2 * i + 2], [0xab, 0xab], "{name}: {dtype}: element {i} was touched")
                    }
                    true => assert!((f64::from(got[i]) - expected.out[i]).abs() < 0.03, "{name}: {dtype}: element {i}"),
                }
            }
        }
    }
}

#[test]
fn the_same_inputs_give_the_same_bits() {
    for (name, runtime) in runtimes() {
        let desc = AttentionDesc { heads: 4, kv_heads: 1, head_dim: 16, lse: true, ..Default::default() };
        let batch = Batch::new(&desc, uniform(1, 2), uniform(1, 1000));
        let tensors = Tensors::random(&desc, &batch, &mut Data::new(9));
        let attention = Attention::new(runtime, &desc).unwrap();
        assert!(attention.schedule(&batch).unwrap().split_tiles() > 0, "{name}: this is to test the merge");
        let first = block(attention.run(&batch, &tensors.input())).unwrap();
        for _ in 0..5 {
            assert_eq!(block(attention.run(&batch, &tensors.input())).unwrap(), first, "{name}");
        }
    }
}

/// A decode step is the last row of a prefill; a constant V comes out as it is; sequences do not see each other.
#[test]
fn laws() {
    for (name, runtime) in runtimes() {
        let desc = AttentionDesc { heads: 4, kv_heads: 2, head_dim: 16, causal: true, lse: true, ..Default::default() };
        let prefill = Batch::new(&desc, uniform(1, 90), uniform(1, 90));
        let mut tensors = Tensors::random(&desc, &prefill, &mut Data::new(10));
        let all = check(name, runtime, &desc, &prefill, &tensors, "prefill");
        let last = Tensors { q: tensors.q[89 * 64..].to_vec(), ..tensors.clone() };
        let decode = Batch::new(&desc, uniform(1, 1), uniform(1, 90));
        let one = check(name, runtime, &desc, &decode, &last, "decode");
        let far = one.out.iter().zip(&all.out[89 * 64..]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < 1e-6, "{name}: the last row differs by {far}");

        tensors.v = tensors.v.iter().map(|_| 1.5).collect();
        let got = check(name, runtime, &desc, &prefill, &tensors, "constant V");
        assert!(got.out.iter().all(|x| (x - 1.5).abs() < 1e-6), "{name}");
    }
}

#[test]
fn more_tiles_than_a_dispatch_has_workgroups() {
    for (name, runtime) in runtimes() {
        let desc = AttentionDesc { head_dim: 4, lse: true, ..Default::default() };
        let count = 70_000;
        let offsets: Vec<u32> = (0..=count).collect();
        let batch = Batch::new(&desc, Lengths::Ragged { offsets: &offsets }, Lengths::Ragged { offsets: &offsets });
        let tensors = Tensors::random(&desc, &batch, &mut Data::new(11));
        let attention = Attention::new(runtime, &desc).unwrap();
        assert_eq!(attention.schedule(&batch).unwrap().dispatches(), 2);
        let got = block(attention.run(&batch, &tensors.input())).unwrap();
        assert_eq!(got.out, tensors.v, "{name}: one key each: O is V");
    }
}

/// Partial states share a workspace in rounds; here it holds few of them.
#[test]
fn split_work_in_rounds() {
    for (name, runtime) in runtimes() {
        let mask = CapsMask { binding_bytes: Some(13_000), ..CapsMask::default() };
        let options = RuntimeOptions { mask, verdicts: Some(runtime.verdicts()), ..RuntimeOptions::default() };
        let small = block(Runtime::new(runtime.device().clone(), runtime.queue().clone(), options)).unwrap();
        let desc = AttentionDesc { heads: 6, kv_heads: 1, head_dim: 4, causal: true, lse: true, ..Default::default() };
        let batch = Batch::new(&desc, uniform(3, 16), uniform(3, 256));
        let tensors = Tensors::random(&desc, &batch, &mut Data::new(12));
        let schedule = Attention::new(&small, &desc).unwrap().schedule(&batch).unwrap();
        assert!(schedule.dispatches() >= 4 && schedule.split_tiles() > 0, "{name}: {schedule:?}");
        assert!(schedule.workspace_bytes() <= 13_000);
        check(name, &small, &desc, &batch, &tensors, "rounds");
    }
}

/// Long keys on an adapter whose loops stop early: items are short enough.
#[test]
fn loops_that_stop_early_are_worked_around() {
    for (name, runtime) in runtimes() {
        let desc = AttentionDesc { head_dim: 64, lse: true, ..Default::default() };
        let batch = Batch::new(&desc, uniform(1, 600), uniform(1, 9000));
        let mut tensors = Tensors::random(&desc, &batch, &mut Data::new(13));
        tensors.q.iter_mut().for_each(|x| *x = 0.0);
        let got = block(Attention::new(runtime, &desc).unwrap().run(&batch, &tensors.input())).unwrap();
        let mean = |d: usize| tensors.v.iter().skip(d).step_by(64).map(|x| f64::from(*x)).sum::<f64>() / 9000.0;
        for d in [0, 63] {
            assert!((f64::from(got.out[d]) - mean(d)).abs() < 1e-5, "{name}: {} is not {}", got.out[d], mean(d));
            assert!((f64::from(got.lse[599]) - 9000f64.ln()).abs() < 1e-4, "{name}: {}", got.lse[599]);
        }
    }
}

#[test]
fn a_broken_row_is_found_and_not_used() {
    for (name, runtime) in runtimes() {
        let mut rows = attention::variants();
        // A kernel that looks for ALiBi in another flag and so leaves it out.
        for row in &mut rows {
            if row.name == "attention.tall.portable.q64k32" {
                row.values = &[
                    ("WORKGROUP", 128),
                    ("TEAM", 8),
                    ("KEY_VECS", 1),
                    ("DIM_STEP", 8),
                    ("KEY_STEP", 8),
                    ("ALIBI", 16),
                ];
            }
        }
        let options = RuntimeOptions {
            attention_variants: Some(rows.clone()),
            self_test: SelfTest::All,
            ..RuntimeOptions::default()
        };
        let broken = block(Runtime::new(runtime.device().clone(), runtime.queue().clone(), options)).unwrap();
        let verdict = broken.verdict("attention.tall.portable.q64k32").unwrap();
        assert!(matches!(verdict, Verdict::Failed(_)), "{name}: {verdict:?}");
        let forced = AttentionDesc { variant: Some("attention.tall.portable.q64k32".into()), ..Default::default() };
        let refused = Attention::new(&broken, &forced).unwrap_err();
        assert!(refused.to_string().contains("self-test"), "{name}: {refused}");

        // The others serve, also from verdicts that were kept; mended rows are tested anew.
        let verdicts = Some(broken.verdicts());
        let kept = |rows| RuntimeOptions { verdicts: verdicts.clone(), attention_variants: rows, ..Default::default() };
        let open = |options| block(Runtime::new(runtime.device().clone(), runtime.queue().clone(), options)).unwrap();
        let again = open(RuntimeOptions { self_test: SelfTest::Skip, ..kept(Some(rows)) });
        assert_eq!(again.verdict("attention.tall.portable.q64k32"), Some(verdict));
        let mended = open(RuntimeOptions { self_test: SelfTest::All, ..kept(None) });
        assert_eq!(mended.verdict("attention.tall.portable.q64k32"), Some(&Verdict::Passed));
        let desc = AttentionDesc { variant: Some("portable".into()), lse: true, ..Default::default() };
        let batch = Batch::new(&desc, uniform(1, 40), uniform(1, 40));
        let tensors = Tensors::random(&desc, &batch, &mut Data::new(14));
        check(name, &again, &desc, &batch, &tensors, "the row that is left");
        assert!(!Attention::new(&again, &desc).unwrap().variants().contains(&"attention.tall.portable.q64k32"));
    }
}

/// Without verdicts and without a self-test, only rows that need nothing serve.
#[test]
fn untested_rows_are_not_used() {
    for (_, runtime) in runtimes() {
        let options = RuntimeOptions { self_test: SelfTest::Skip, ..RuntimeOptions::default() };
        let untested = block(Runtime::new(runtime.device().clone(), runtime.queue().clone(), options)).unwrap();
        let attention = Attention::new(&untested, &AttentionDesc::default()).unwrap();
        assert!(attention.variants().iter().all(|name| name.contains("portable")), "{:?}", attention.variants());
    }
}

/// A shader that does not compile is an error with the file and line of the source, not of the linked text.
#[test]
fn compile_errors_name_file_and_line() {
    for (name, runtime) in runtimes() {
        let mut rows = attention::variants();
        rows.retain(|row| row.name == "attention.tall.portable.q64k32");
        rows[0].swaps = &[("reduce", "tanh")]; // a part without the functions that are called
        let options = RuntimeOptions { attention_variants: Some(rows), ..RuntimeOptions::default() };
        let broken = block(Runtime::new(runtime.device().clone(), runtime.queue().clone(), options)).unwrap();
        let Some(Verdict::Failed(message)) = broken.verdict("attention.tall.portable.q64k32") else { panic!("{name}") };
        let (_, place) = message.split_once("shaders/attention.wgsl:").unwrap_or_else(|| panic!("{name}: {message}"));
        let line: usize = place.split(':').next().unwrap().parse().unwrap();
        let text = wgpu_attention::shader::FILES.iter().find(|(file, _)| *file == "attention").unwrap().1;
        let source = text.lines().nth(line - 1).unwrap();
        assert!(source.contains("team_max"), "{name}: line {line}: {source}: {message}");
    }
}
