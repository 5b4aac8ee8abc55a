//! Attention inside an application: its device, its buffers (ranges of one), its encoder, its frame.
//! `cargo run --release --example own_encoder`.

use wgpu_attention::{Attention, AttentionDesc, AttentionIo, Batch, DType, Lengths, Runtime, RuntimeOptions, View};

/// What an application keeps from frame to frame: the layers share a schedule as long as the lengths stay the same.
struct App {
    device: wgpu::Device,
    queue: wgpu::Queue,
    attention: Attention,
    schedule: wgpu_attention::Schedule,
    arena: wgpu::Buffer, // Q, K and V, each at a multiple of 256 bytes
    offsets: [u64; 3],
    out: wgpu::Buffer,
}

const ROWS: u32 = 32;
const KEYS: u32 = 256;

impl App {
    fn new(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self, wgpu_attention::Error> {
        // Once: probe the device and test the kernels on it. `runtime.verdicts()` can be kept for the next start.
        let runtime = pollster::block_on(Runtime::new(device.clone(), queue.clone(), RuntimeOptions::default()))?;
        let half = DType::F16;
        let desc = AttentionDesc {
            heads: 8,
            kv_heads: 8,
            head_dim: 64,
            causal: true,
            q_dtype: half,
            kv_dtype: half,
            out_dtype: half,
            ..AttentionDesc::default()
        };
        let attention = Attention::new(&runtime, &desc)?;
        let batch =
            Batch::new(&desc, Lengths::Uniform { batch: 1, len: ROWS }, Lengths::Uniform { batch: 1, len: KEYS });
        let schedule = attention.schedule(&batch)?;

        let size = |len: u32| u64::from(len * 8 * 64) * half.size();
        let offsets = [0, size(ROWS), size(ROWS) + size(KEYS)];
        let buffer = |label, size, usage| {
            device.create_buffer(&wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false })
        };
        use wgpu::BufferUsages as Usage;
        let arena = buffer("arena", offsets[2] + size(KEYS), Usage::STORAGE | Usage::COPY_DST);
        let out = buffer("out", size(ROWS), Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST);
        Ok(App { device, queue, attention, schedule, arena, offsets, out })
    }

    fn frame(&self) -> Result<(), wgpu_attention::Error> {
        let mut encoder = self.device.create_command_encoder(&Default::default());
        // … the application's own work before, such as a projection that writes Q, K and V …
        encoder.clear_buffer(&self.out, 0, None);

        let part = |i: usize| View { buffer: &self.arena, offset: self.offsets[i] };
        let io = AttentionIo {
            q: part(0),
            k: part(1),
            v: part(2),
            out: View::from(&self.out),
            lse: None,
            bias: None,
            mask: None,
        };
        self.attention.record(&mut encoder, &self.schedule, &io)?;

        // … and after, in the same encoder; the library never submits.
        self.queue.submit([encoder.finish()]);
        Ok(())
    }
}

pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default()))?;
    // Subgroups are worth asking for; nothing else is needed.
    let required_features = adapter.features() & wgpu::Features::SUBGROUP;
    let descriptor = wgpu::DeviceDescriptor { required_features, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))?;
    let app = App::new(device, queue)?;

    // K = 0 makes all weights equal; V = 1 then gives O = 1.
    let ones = DType::F16.encode(&vec![1.0; (KEYS * 8 * 64) as usize]);
    app.queue.write_buffer(&app.arena, app.offsets[2], &ones);
    for _ in 0..3 {
        app.frame()?;
    }
    let bytes = pollster::block_on(app.attention.runtime().read(&app.out, app.out.size()))?;
    let values = DType::F16.decode(&bytes, (ROWS * 8 * 64) as usize);
    if values.iter().any(|x| (x - 1.0).abs() > 1e-3) {
        return Err(format!("O should be 1 everywhere, but starts {:?}", &values[..4]).into());
    }
    println!(
        "three frames with {:?} on {}: O is 1, as it should be",
        app.attention.variants(),
        adapter.get_info().name
    );
    Ok(())
}
