//! Attention on host slices: `cargo run --release --example attention`.

use wgpu_attention::{
    Attention, AttentionDesc, Batch, HostInput, HostMask, Lengths, Runtime, RuntimeOptions, adapters,
};

pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let adapter = pollster::block_on(adapters()).into_iter().next().ok_or("no GPU adapter: install a Vulkan driver")?;
    let runtime = pollster::block_on(Runtime::open(&adapter, RuntimeOptions::default()))?;

    // 8 query heads on 2 key/value heads of 64, causal, 100 new rows after 28 that are only keys.
    let desc = AttentionDesc { heads: 8, kv_heads: 2, head_dim: 64, causal: true, lse: true, ..Default::default() };
    let batch = Batch::new(&desc, Lengths::Uniform { batch: 1, len: 100 }, Lengths::Uniform { batch: 1, len: 128 });
    let wave = |len: usize| (0..len).map(|i| (i as f32 * 0.1).sin()).collect::<Vec<f32>>();
    let (q, k, v) = (wave(100 * 8 * 64), wave(128 * 2 * 64), wave(128 * 2 * 64));
    let input = HostInput { q: &q, k: &k, v: &v, bias: None, mask: HostMask::None };
    let result = pollster::block_on(Attention::new(&runtime, &desc)?.run(&batch, &input))?;
    println!("on {}: O starts {:?}", adapter.get_info().name, &result.out[..4]);
    Ok(())
}
