//! What the benchmarks share.

use pollster::block_on;
use wgpu_attention::{Runtime, RuntimeOptions, adapters};

/// The best adapter, or the one whose name holds `WGPU_ATTENTION_ADAPTER`.
pub fn open() -> Runtime {
    let wanted = std::env::var("WGPU_ATTENTION_ADAPTER").unwrap_or_default().to_lowercase();
    let mut found = block_on(adapters());
    found.retain(|adapter| adapter.get_info().name.to_lowercase().contains(&wanted));
    found.sort_by_key(|adapter| adapter.get_info().device_type == wgpu::DeviceType::Cpu);
    let adapter = found.first().expect("no graphics adapter of that name: is there a Vulkan driver?");
    println!("{}", adapter.get_info().name);
    block_on(Runtime::open(adapter, RuntimeOptions::default())).unwrap()
}
