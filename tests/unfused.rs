//! The unfused baseline against the f64 oracle on every adapter: sizes at tile edges, types, layouts, chunks, refusals.

mod common;

use common::*;
use wgpu_attention::ops::unfused::{Unfused, UnfusedIo};
use wgpu_attention::*;

fn uniform(batch: u32, len: u32) -> Lengths<'static> {
    Lengths::Uniform { batch, len }
}

fn run(runtime: &Runtime, desc: &AttentionDesc, batch: &Batch, tensors: &Tensors, out_len: usize) -> HostOutput {
    let unfused = Unfused::new(runtime, desc, batch).unwrap();
    let storage = wgpu::BufferUsages::STORAGE;
    let upload = |values: &[f32], dtype: DType| runtime.upload("in", &dtype.encode(values), storage).unwrap();
    let (q, k, v) =
        (upload(&tensors.q, desc.q_dtype), upload(&tensors.k, desc.kv_dtype), upload(&tensors.v, desc.kv_dtype));
    let bytes = (out_len as u64 * desc.out_dtype.size()).next_multiple_of(4);
    let out = runtime.buffer("out", bytes, storage | wgpu::BufferUsages::COPY_SRC).unwrap();
    let mut encoder = runtime.device().create_command_encoder(&Default::default());
    let io = UnfusedIo { q: (&q).into(), k: (&k).into(), v: (&v).into(), out: (&out).into() };
    unfused.record(&mut encoder, &io).unwrap();
    runtime.queue().submit([encoder.finish()]);
    HostOutput { out: desc.out_dtype.decode(&block(runtime.read(&out, bytes)).unwrap(), out_len), lse: Vec::new() }
}

#[test]
fn sizes_types_and_masks() {
    let mut data = Data::new(2);
    // heads, KV heads, QK dim, V dim, sequences, rows, keys
    let shapes = [
        [1, 1, 64, 64, 1, 64, 64],
        [4, 2, 64, 64, 2, 100, 130],
        [6, 2, 20, 12, 1, 70, 67],
        [7, 1, 33, 65, 2, 9, 63],
        [2, 2, 128, 128, 1, 65, 257],
        [3, 1, 5, 3, 3, 1, 1],
        [2, 1, 8, 8, 1, 3, 0],
        [2, 1, 8, 8, 2, 0, 3],
    ];
    for (i, [heads, kv_heads, head_dim, v_dim, sequences, q_len, kv_len]) in shapes.into_iter().enumerate() {
        for causal in [false, true] {
            let dtype = DType::ALL[(i + usize::from(causal)) % 3];
            let desc = AttentionDesc {
                heads,
                kv_heads,
                head_dim,
                v_head_dim: Some(v_dim),
                q_dtype: dtype,
                kv_dtype: DType::ALL[i % 3],
                out_dtype: dtype,
                causal,
                ..AttentionDesc::default()
            };
            let mut batch = Batch::new(&desc, uniform(sequences, q_len), uniform(sequences, kv_len));
            if i % 2 == 1 {
                batch.k_layout = Layout::bhsd(kv_len, kv_heads, head_dim);
                batch.out_layout = Layout::bhsd(q_len, heads, v_dim);
                batch.start = Start::TopLeft;
            }
            let tensors = Tensors::random(&desc, &batch, &mut data);
            let expected = Expected::of(&desc, &batch, &tensors.input());
            for (name, runtime) in runtimes() {
                let got = run(runtime, &desc, &batch, &tensors, expected.out.len());
                expected.check(&got, false, &format!("{name}: shape {i}, {dtype}, causal {causal}"));
            }
        }
    }
}

/// A runtime whose bindings hold 256 KiB.
fn small(adapter: &wgpu::Adapter) -> Runtime {
    let required_limits = wgpu::Limits { max_storage_buffer_binding_size: 256 << 10, ..Default::default() };
    let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
    let (device, queue) = block(adapter.request_device(&descriptor)).unwrap();
    let options = RuntimeOptions { self_test: SelfTest::Skip, ..Default::default() };
    block(Runtime::new(device, queue, options)).unwrap()
}

#[test]
fn scores_that_do_not_fit_at_once_are_done_in_chunks() {
    let mut data = Data::new(3);
    for adapter in block(adapters()) {
        let runtime = small(&adapter);
        // 101 kB of scores a KV head: two at a time, ten in all.
        let desc = AttentionDesc { heads: 10, kv_heads: 5, head_dim: 8, ..AttentionDesc::default() };
        let batch = Batch::new(&desc, uniform(2, 60), uniform(2, 207));
        let tensors = Tensors::random(&desc, &batch, &mut data);
        let expected = Expected::of(&desc, &batch, &tensors.input());
        let got = run(&runtime, &desc, &batch, &tensors, expected.out.len());
        expected.check(&got, false, &adapter.get_info().name);

        let unfused = Unfused::new(&runtime, &desc, &batch).unwrap();
        assert_eq!(unfused.workspace_bytes(), 2 * 120 * 53 * 16);
        let long = Batch::new(&desc, uniform(2, 60), uniform(2, 999));
        assert!(matches!(Unfused::new(&runtime, &desc, &long), Err(Error::Limit { .. })));
    }
}

#[test]
fn what_it_does_not_know_is_refused() {
    let (_, runtime) = &runtimes()[0];
    let refused = |desc: AttentionDesc, q: Lengths, kv: Lengths| {
        Unfused::new(runtime, &desc, &Batch::new(&desc, q, kv)).unwrap_err()
    };
    let windowed =
        AttentionDesc { window: Window { left: Some(3), right: None }, head_dim: 4, ..AttentionDesc::default() };
    assert!(matches!(refused(windowed, uniform(1, 1), uniform(1, 1)), Error::Unsupported { .. }));
    let ragged = Lengths::Ragged { offsets: &[0, 2, 3] };
    assert!(matches!(refused(AttentionDesc::default(), ragged, ragged), Error::Unsupported { .. }));
    let long = refused(AttentionDesc::default(), uniform(1, 1 << 20), uniform(1, 1 << 20));
    assert!(matches!(long, Error::Limit { .. }), "{long}");
}
