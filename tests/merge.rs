//! Merging of attention states, against the oracle and against attention over all keys at once.

mod common;

use common::*;
use wgpu_attention::*;

fn merge(runtime: &Runtime, desc: &MergeDesc, layout: &MergeLayout, o: &[f32], lse: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let merge = Merge::new(runtime, desc, layout).unwrap();
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let states = runtime.upload("states", &desc.state_dtype.encode(o), usage).unwrap();
    let weights = runtime.upload("lse", &DType::F32.encode(lse), usage).unwrap();
    let (rows, heads, dim) = (layout.rows as u64, u64::from(desc.heads), u64::from(desc.v_head_dim));
    let len = rows * heads * dim;
    let out = runtime.buffer("out", len * desc.out_dtype.size(), usage).unwrap();
    let out_lse = runtime.buffer("out lse", rows * heads * 4, usage).unwrap();
    let io =
        MergeIo { states: (&states).into(), lse: (&weights).into(), out: (&out).into(), out_lse: (&out_lse).into() };
    let mut encoder = runtime.device().create_command_encoder(&Default::default());
    merge.record(&mut encoder, &io).unwrap();
    runtime.queue().submit([encoder.finish()]);
    let bytes = block(runtime.read(&out, len * desc.out_dtype.size())).unwrap();
    let lse = block(runtime.read(&out_lse, rows * heads * 4)).unwrap();
    (desc.out_dtype.decode(&bytes, len as usize), DType::F32.decode(&lse, (rows * heads) as usize))
}

fn contiguous(states: u32, rows: u32, desc: &MergeDesc) -> MergeLayout {
    let layout = Layout::bshd(rows, desc.heads, desc.v_head_dim);
    MergeLayout { states, rows, state_layout: layout, out_layout: layout }
}

fn desc(heads: u32, v_head_dim: u32) -> MergeDesc {
    MergeDesc { heads, v_head_dim, state_dtype: DType::F32, out_dtype: DType::F32, sinks: None }
}

/// Random states with empty ones among them, both infinities; EasyContext 14, ring-flash-attention 42: LSEs 10⁴ apart.
#[test]
fn merges_match_the_oracle() {
    for (name, runtime) in runtimes() {
        for (turn, dtype) in DType::ALL.into_iter().enumerate() {
            for (states, rows, heads, dim) in
                [(2, 5, 3, 8), (1, 1, 1, 1), (7, 33, 2, 13), (3, 4, 2, 512), (0, 3, 2, 4), (2, 0, 2, 4)]
            {
                let sinks = (turn == 1).then(|| (0..heads).map(|h| h as f32 - 0.5).collect());
                let desc = MergeDesc { state_dtype: dtype, out_dtype: dtype, sinks, ..desc(heads, dim) };
                let layout = contiguous(states, rows, &desc);
                let mut data = Data::new(60 + turn as u64);
                let o = data.tensor((states * rows * heads * dim) as usize, dtype);
                let lse: Vec<f32> = (0..states * rows * heads)
                    .map(|i| match i % 5 {
                        0 => f32::NEG_INFINITY,
                        1 => f32::INFINITY,
                        2 => data.normal() * 1e4,
                        _ => data.normal(),
                    })
                    .collect();
                if rows == 0 {
                    Merge::new(runtime, &desc, &layout).unwrap();
                    continue;
                }
                let (out, sums) = merge(runtime, &desc, &layout, &o, &lse);
                let (want, want_lse) = reference::merge::<f64>(&desc, &layout, &o, &lse).unwrap();
                let what = format!("{name}: {dtype}, {states} states, {rows} rows, dim {dim}");
                let ulp = if dtype == DType::F32 {
                    4e-6
                } else {
                    4.0 * 2f64.powi(if dtype == DType::F16 { -10 } else { -7 })
                };
                compare(&out, &want, 4.0 * ulp, &what);
                compare(&sums, &want_lse, 4e-3, &what);
            }
        }
    }
}

/// flashinfer 4051, vllm 28181: nothing and nothing is nothing. flash-attention 978, vllm 15492: +∞ is empty, and what an
/// empty state holds does not matter.
#[test]
fn cases_4_5_empty_states() {
    for (name, runtime) in runtimes() {
        let desc = desc(1, 4);
        let layout = contiguous(2, 1, &desc);
        let none = f32::NEG_INFINITY;
        let nan = [f32::NAN; 4];
        let one = [1.0, 2.0, 3.0, 4.0];
        let both = |a: [f32; 4], b: [f32; 4]| [a, b].concat();
        assert_eq!(
            merge(runtime, &desc, &layout, &both(nan, nan), &[none, none]),
            (vec![0.0; 4], vec![none]),
            "{name}"
        );
        for empty in [none, f32::INFINITY] {
            let (out, lse) = merge(runtime, &desc, &layout, &both(one, nan), &[0.5, empty]);
            assert_eq!((out, lse), (one.to_vec(), vec![0.5]), "{name}");
            let (out, lse) = merge(runtime, &desc, &layout, &both(one, one), &[f32::NAN, 0.5]);
            let lost = out.iter().chain(&lse).all(|x| x.is_nan());
            assert!(lost || !runtime.caps().keeps_nan, "{name}: a NaN LSE: {out:?} {lse:?}");
            let (out, lse) = merge(runtime, &desc, &layout, &both(nan, one), &[empty, -3.0]);
            assert_eq!((out, lse), (one.to_vec(), vec![-3.0]), "{name}");
        }
    }
}

/// sglang 40903: a long prefix and a suffix, attended apart and merged, equal attention over both; sinks count once.
#[test]
fn case_6_prefix_and_suffix() {
    for (name, runtime) in runtimes() {
        for sinks in [None, Some(vec![0.25, -2.0])] {
            let flat = AttentionDesc {
                heads: 2,
                head_dim: 8,
                lse: true,
                causal: true,
                sinks: sinks.clone(),
                ..Default::default()
            };
            let (prefix, suffix) = (3072u32, 64u32);
            let uniform = |len| Lengths::Uniform { batch: 1, len };
            let whole = Batch::new(&flat, uniform(suffix), uniform(prefix + suffix));
            let flat = AttentionDesc { kv_heads: 2, ..flat };
            let whole = Batch { k_layout: Layout::bshd(0, 2, 8), v_layout: Layout::bshd(0, 2, 8), ..whole };
            let mut data = Data::new(6);
            let q = data.tensor((suffix * 16) as usize, DType::F32);
            let k = data.tensor(((prefix + suffix) * 16) as usize, DType::F32);
            let v = data.tensor(((prefix + suffix) * 16) as usize, DType::F32);
            let run = |desc: &AttentionDesc, batch: &Batch, k: &[f32], v: &[f32]| {
                let input = HostInput { q: &q, k, v, bias: None, mask: HostMask::None };
                block(Attention::new(runtime, desc).unwrap().run(batch, &input)).unwrap()
            };
            let expected = run(&flat, &whole, &k, &v);
            let part = AttentionDesc { sinks: None, ..flat.clone() };
            let cut = (prefix * 16) as usize;
            let first = AttentionDesc { causal: false, ..part.clone() };
            let first = run(&first, &Batch { kv: uniform(prefix), ..whole }, &k[..cut], &v[..cut]);
            let second = run(&part, &Batch { kv: uniform(suffix), ..whole }, &k[cut..], &v[cut..]);
            let desc = MergeDesc { sinks, ..desc(2, 8) };
            let layout = contiguous(2, suffix, &desc);
            let (out, lse) =
                merge(runtime, &desc, &layout, &[first.out, second.out].concat(), &[first.lse, second.lse].concat());
            let as_f64 = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            compare(&out, &as_f64(&expected.out), 2e-6, name);
            compare(&lse, &as_f64(&expected.lse), 2e-5, name);
        }
    }
}

#[test]
fn wrong_merges_are_refused() {
    let (_, runtime) = &runtimes()[0];
    let good = desc(2, 8);
    let layout = contiguous(2, 3, &good);
    let refused = |desc: &MergeDesc, layout: &MergeLayout| Merge::new(runtime, desc, layout).unwrap_err().to_string();
    assert!(refused(&MergeDesc { heads: 0, ..good.clone() }, &layout).contains("heads"));
    assert!(refused(&MergeDesc { v_head_dim: 513, ..good.clone() }, &layout).contains("v_head_dim"));
    assert!(refused(&MergeDesc { sinks: Some(vec![1.0]), ..good.clone() }, &layout).contains("sinks"));
    assert!(refused(&MergeDesc { sinks: Some(vec![f32::NAN; 2]), ..good.clone() }, &layout).contains("sinks"));
    let overlapping = MergeLayout { out_layout: Layout { head: 4, ..layout.out_layout }, ..layout };
    assert!(refused(&good, &overlapping).contains("out_layout"));
    for (name, runtime) in runtimes() {
        // More states than an adapter's loops go over.
        if let Some(limit) = runtime.caps().loop_limit {
            let many =
                MergeLayout { states: limit + 1, state_layout: Layout { batch: 0, ..layout.state_layout }, ..layout };
            let error = Merge::new(runtime, &good, &many).unwrap_err().to_string();
            assert!(error.contains("states"), "{name}: {error}");
        }
    }
    let huge = MergeLayout { states: u32::MAX, rows: u32::MAX, ..layout };
    assert!(refused(&good, &huge).contains("limit"));
}
