//! Inside an application: its encoder, its passes, ranges of its buffers, several plans at once.

mod common;

use common::*;
use wgpu_attention::*;

const STORAGE: wgpu::BufferUsages =
    wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_SRC).union(wgpu::BufferUsages::COPY_DST);

fn uniform(batch: u32, len: u32) -> Lengths<'static> {
    Lengths::Uniform { batch, len }
}

fn desc() -> AttentionDesc {
    AttentionDesc { heads: 4, kv_heads: 2, head_dim: 16, lse: true, causal: true, ..AttentionDesc::default() }
}

/// Buffers of one problem: inputs one after the other in one buffer, each output between canaries.
struct Scene {
    inputs: wgpu::Buffer,
    offsets: [u64; 3],
    out: wgpu::Buffer,
    lse: wgpu::Buffer,
    expected: Expected,
    out_len: usize,
    lse_len: usize,
}

const CANARY: u8 = 0x5a;
const MARGIN: u64 = 256;

impl Scene {
    fn new(runtime: &Runtime, desc: &AttentionDesc, batch: &Batch, seed: u64) -> Self {
        let tensors = Tensors::random(desc, batch, &mut Data::new(seed));
        let mut bytes = vec![CANARY; MARGIN as usize];
        let mut offsets = [0; 3];
        for (offset, values) in offsets.iter_mut().zip([&tensors.q, &tensors.k, &tensors.v]) {
            bytes.resize(bytes.len().next_multiple_of(256), CANARY);
            *offset = bytes.len() as u64;
            bytes.extend(desc.q_dtype.encode(values));
        }
        let expected = Expected::of(desc, batch, &tensors.input());
        let (out_len, lse_len) = (expected.out.len(), expected.lse.len());
        let guarded = |len: usize| vec![CANARY; 2 * MARGIN as usize + 4 * len];
        Scene {
            inputs: runtime.upload("inputs", &bytes, STORAGE).unwrap(),
            out: runtime.upload("out", &guarded(out_len), STORAGE).unwrap(),
            lse: runtime.upload("lse", &guarded(lse_len), STORAGE).unwrap(),
            offsets,
            expected,
            out_len,
            lse_len,
        }
    }

    fn io(&self) -> AttentionIo<'_> {
        let input = |i: usize| View { buffer: &self.inputs, offset: self.offsets[i] };
        AttentionIo {
            q: input(0),
            k: input(1),
            v: input(2),
            out: View { buffer: &self.out, offset: MARGIN },
            lse: Some(View { buffer: &self.lse, offset: MARGIN }),
            bias: None,
            mask: None,
        }
    }

    fn check(&self, runtime: &Runtime, what: &str) {
        let inside = |buffer: &wgpu::Buffer, len: usize| {
            let bytes = block(runtime.read(buffer, 2 * MARGIN + 4 * len as u64)).unwrap();
            let (before, rest) = bytes.split_at(MARGIN as usize);
            let (values, after) = rest.split_at(4 * len);
            assert!(before.iter().chain(after).all(|byte| *byte == CANARY), "{what}: a canary died");
            DType::F32.decode(values, len)
        };
        let got = HostOutput { out: inside(&self.out, self.out_len), lse: inside(&self.lse, self.lse_len) };
        self.expected.check(&got, true, what);
    }
}

fn submit(runtime: &Runtime, record: impl FnOnce(&mut wgpu::CommandEncoder)) {
    let mut encoder = runtime.device().create_command_encoder(&Default::default());
    record(&mut encoder);
    runtime.queue().submit([encoder.finish()]);
}

/// Two plans in one encoder, each with ranges of the application's buffers, in one frame with other work.
#[test]
fn two_plans_in_one_encoder_between_canaries() {
    for (name, runtime) in runtimes() {
        let attention = Attention::new(runtime, &desc()).unwrap();
        let first = Batch::new(attention.desc(), uniform(2, 5), uniform(2, 70));
        let second = Batch::new(attention.desc(), uniform(1, 40), uniform(1, 41));
        let split = Batch::new(attention.desc(), uniform(1, 1), uniform(1, 600));
        let scenes: Vec<_> =
            [first, second, split].iter().map(|batch| Scene::new(runtime, attention.desc(), batch, 20)).collect();
        let schedules: Vec<_> = [first, second, split].iter().map(|batch| attention.schedule(batch).unwrap()).collect();
        submit(runtime, |encoder| {
            for (scene, schedule) in scenes.iter().zip(&schedules) {
                attention.record(encoder, schedule, &scene.io()).unwrap();
            }
        });
        drop((schedules, attention)); // what is recorded keeps what it needs
        for scene in &scenes {
            scene.check(runtime, name);
        }
    }
}

/// onnxruntime 26367 and burn 5181: the same plan again with new data, and twice in flight.
#[test]
fn cases_36_52_one_plan_many_times() {
    for (name, runtime) in runtimes() {
        let attention = Attention::new(runtime, &desc()).unwrap();
        let batch = Batch::new(attention.desc(), uniform(1, 3), uniform(1, 500));
        let schedule = attention.schedule(&batch).unwrap();
        let scenes: Vec<_> = (0..3).map(|seed| Scene::new(runtime, attention.desc(), &batch, 30 + seed)).collect();
        for scene in &scenes {
            submit(runtime, |encoder| attention.record(encoder, &schedule, &scene.io()).unwrap());
        }
        for scene in &scenes {
            scene.check(runtime, &format!("{name}: in flight together"));
        }
        // New bytes in the same buffers.
        let (old, new) = (&scenes[0], &scenes[1]);
        submit(runtime, |encoder| {
            encoder.copy_buffer_to_buffer(&new.inputs, 0, &old.inputs, 0, old.inputs.size());
            attention.record(encoder, &schedule, &old.io()).unwrap();
        });
        let moved = Scene {
            out: old.out.clone(),
            lse: old.lse.clone(),
            inputs: old.inputs.clone(),
            ..Scene::new(runtime, attention.desc(), &batch, 31)
        };
        moved.check(runtime, &format!("{name}: new data in the same buffers"));
    }
}

/// Inside a pass of the caller, and a schedule shared by layers that differ in scale and softcap only.
#[test]
fn a_pass_of_the_caller_and_a_shared_schedule() {
    for (name, runtime) in runtimes() {
        let first = Attention::new(runtime, &desc()).unwrap();
        let capped = AttentionDesc { softcap: Some(2.0), scale: Some(0.7), ..desc() };
        let second = Attention::new(runtime, &capped).unwrap();
        let batch = Batch::new(first.desc(), uniform(1, 9), uniform(1, 300));
        let schedule = first.schedule(&batch).unwrap();
        let scenes = [Scene::new(runtime, &desc(), &batch, 40), Scene::new(runtime, &capped, &batch, 41)];
        submit(runtime, |encoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            first.record_in(&mut pass, &schedule, &scenes[0].io()).unwrap();
            second.record_in(&mut pass, &schedule, &scenes[1].io()).unwrap();
        });
        scenes[0].check(runtime, name);
        scenes[1].check(runtime, name);
    }
}

/// What does not fit is refused before anything is recorded, by a message that says what would.
#[test]
fn wrong_buffers_are_refused() {
    for (name, runtime) in runtimes() {
        let attention = Attention::new(runtime, &desc()).unwrap();
        let batch = Batch::new(attention.desc(), uniform(1, 4), uniform(1, 40));
        let schedule = attention.schedule(&batch).unwrap();
        let scene = Scene::new(runtime, attention.desc(), &batch, 50);
        let good = scene.io();
        let small = runtime.buffer("small", 64, STORAGE).unwrap();
        let copies = runtime.buffer("copies", 1 << 16, wgpu::BufferUsages::COPY_DST).unwrap();
        let other = AttentionDesc { heads: 2, ..desc() };
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        let mut refused = |io: AttentionIo, part: &str| {
            let error = attention.record(&mut encoder, &schedule, &io).unwrap_err();
            let message = error.to_string();
            assert!(matches!(error, Error::Shape { .. }) && message.contains(part), "{name}: {message}");
        };
        refused(AttentionIo { k: (&small).into(), ..good }, "at least");
        refused(AttentionIo { out: (&small).into(), ..good }, "at least");
        refused(AttentionIo { q: (&copies).into(), ..good }, "STORAGE");
        refused(AttentionIo { q: View { offset: good.q.offset + 4, ..good.q }, ..good }, "multiple of");
        refused(AttentionIo { q: View { offset: 1 << 40, ..good.q }, ..good }, "at least");
        let far = View { offset: u64::MAX - 255, ..good.out };
        refused(AttentionIo { lse: Some(far), ..good }, "at least");
        refused(AttentionIo { lse: None, ..good }, "lse");
        refused(AttentionIo { bias: Some(good.q), ..good }, "bias");
        refused(AttentionIo { mask: Some(good.q), ..good }, "mask");
        refused(AttentionIo { out: View { buffer: good.q.buffer, offset: 0 }, ..good }, "a buffer other than");
        let wrong = Attention::new(runtime, &other).unwrap().record(&mut encoder, &schedule, &good).unwrap_err();
        assert!(wrong.to_string().contains("schedule"), "{name}: {wrong}");
        // The encoder is as good as new.
        attention.record(&mut encoder, &schedule, &good).unwrap();
        runtime.queue().submit([encoder.finish()]);
        scene.check(runtime, name);
    }
}

/// transformers.js 1545: a lost device is an error value, whoever owns the device.
#[test]
fn case_51_a_lost_device_is_an_error() {
    for adapter in block(adapters()) {
        for own in [true, false] {
            let runtime = if own {
                block(Runtime::open(&adapter, RuntimeOptions::default())).unwrap()
            } else {
                let (device, queue) = block(adapter.request_device(&Default::default())).unwrap();
                block(Runtime::new(device, queue, RuntimeOptions::default())).unwrap()
            };
            let attention = Attention::new(&runtime, &desc()).unwrap();
            let batch = Batch::new(attention.desc(), uniform(1, 4), uniform(1, 40));
            let tensors = Tensors::random(attention.desc(), &batch, &mut Data::new(51));
            block(attention.run(&batch, &tensors.input())).unwrap();
            runtime.device().destroy();
            for _ in 0..2 {
                match block(attention.run(&batch, &tensors.input())) {
                    Err(Error::DeviceLost(_)) => {}
                    other => panic!("own {own}: {other:?}"),
                }
            }
        }
    }
}

/// A damaged or foreign pipeline cache does no harm.
#[test]
fn pipeline_caches_are_checked() {
    for adapter in block(adapters()) {
        let runtime = block(Runtime::open(&adapter, RuntimeOptions::default())).unwrap();
        let verdicts = Some(runtime.verdicts());
        let Some(kept) = runtime.pipeline_cache() else { continue };
        for bytes in [kept.clone(), kept[..kept.len() / 2].to_vec(), Vec::new(), vec![7; 1000]] {
            let options =
                RuntimeOptions { pipeline_cache: Some(bytes), verdicts: verdicts.clone(), ..Default::default() };
            let runtime = block(Runtime::open(&adapter, options)).unwrap();
            let attention = Attention::new(&runtime, &desc()).unwrap();
            let batch = Batch::new(attention.desc(), uniform(1, 4), uniform(1, 40));
            let scene = Scene::new(&runtime, attention.desc(), &batch, 52);
            submit(&runtime, |encoder| {
                attention.record(encoder, &attention.schedule(&batch).unwrap(), &scene.io()).unwrap()
            });
            scene.check(&runtime, &short_name(&adapter.get_info()));
        }
    }
}

/// Outputs that overlap, schedules of another runtime and reads past a buffer are refused.
#[test]
fn overlaps_strangers_and_long_reads_are_refused() {
    for (name, runtime) in runtimes() {
        let attention = Attention::new(runtime, &desc()).unwrap();
        let batch = Batch::new(attention.desc(), uniform(1, 4), uniform(1, 40));
        let schedule = attention.schedule(&batch).unwrap();
        let scene = Scene::new(runtime, attention.desc(), &batch, 70);
        let io = AttentionIo { lse: Some(scene.io().out), ..scene.io() };
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        let error = attention.record(&mut encoder, &schedule, &io).unwrap_err();
        assert!(error.to_string().contains("overlaps"), "{name}: {error}");

        let options = RuntimeOptions { verdicts: Some(runtime.verdicts()), ..RuntimeOptions::default() };
        let other = block(Runtime::new(runtime.device().clone(), runtime.queue().clone(), options)).unwrap();
        let other = Attention::new(&other, &desc()).unwrap().schedule(&batch).unwrap();
        let error = attention.record(&mut encoder, &other, &scene.io()).unwrap_err();
        assert!(error.to_string().contains("another Runtime"), "{name}: {error}");

        let small = runtime.buffer("small", 32, STORAGE).unwrap();
        assert!(block(runtime.read(&small, 64)).is_err(), "{name}");
        let unreadable = runtime.buffer("unreadable", 32, wgpu::BufferUsages::STORAGE).unwrap();
        assert!(block(runtime.read(&unreadable, 16)).is_err(), "{name}");
    }
}

/// Devices with less than usual: what fits runs, what does not is an error that names the limit, and nothing panics.
#[test]
fn devices_with_little() {
    for adapter in block(adapters()) {
        let open = |limits: wgpu::Limits| {
            let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
            block(adapter.request_device(&descriptor)).unwrap()
        };
        // 2000 items of 72 bytes, where 65,536 can be bound.
        let (device, queue) = open(wgpu::Limits { max_storage_buffer_binding_size: 65_536, ..Default::default() });
        let runtime = block(Runtime::new(device, queue, RuntimeOptions::default())).unwrap();
        let desc = AttentionDesc { head_dim: 4, ..AttentionDesc::default() };
        let offsets: Vec<u32> = (0..=2000).collect();
        let batch = Batch::new(&desc, Lengths::Ragged { offsets: &offsets }, Lengths::Ragged { offsets: &offsets });
        let tensors = Tensors::random(&desc, &batch, &mut Data::new(71));
        let attention = Attention::new(&runtime, &desc).unwrap();
        assert_eq!(attention.schedule(&batch).unwrap().dispatches(), 3);
        assert_eq!(block(attention.run(&batch, &tensors.input())).unwrap().out, tensors.v);

        let (device, queue) = open(wgpu::Limits { max_storage_buffers_per_shader_stage: 4, ..Default::default() });
        let runtime = block(Runtime::new(device, queue, RuntimeOptions::default())).unwrap();
        let error = Attention::new(&runtime, &desc).unwrap_err().to_string();
        assert!(error.contains("storage buffers"), "{error}");

        let limits = wgpu::Limits { max_compute_workgroups_per_dimension: 16, ..Default::default() };
        let (device, queue) = open(limits);
        let error = block(Runtime::new(device, queue, RuntimeOptions::default())).unwrap_err().to_string();
        assert!(error.contains("max_compute_workgroups_per_dimension"), "{error}");
    }
}
