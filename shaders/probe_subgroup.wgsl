// The size of subgroups as a dispatch sees it.
@group(0) @binding(0) var<storage, read> input: array<u32>;
@group(0) @binding(1) var<storage, read_write> result: array<u32>;

@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(subgroup_size) size: u32) {
    if lane == 0u {
        result[0] = size + 0u * input[0];
    }
}
