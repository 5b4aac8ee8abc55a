// The log-sum-exp of a row, f32 as bits (WGSL has no constant for −∞).
@group(0) @binding(10) var<storage, read_write> lse: array<u32>;

fn put_lse(index: u32, bits: u32) {
    lse[index] = bits;
}
