// Copies ranges within one pool, which a buffer-to-buffer copy may not: pool[to + i] = pool[start + i] for i < words, bit by bit.
// Nothing that one dispatch reads is written by it, and no two copies write to one place.
//
// Workgroup y does copy y; the workgroups of x share its words, a lane takes every (WORKGROUP · workgroups)th.

// In 32-bit words.
struct Range {
    start: u32,
    to: u32,
    words: u32,
}

const WORKGROUP: u32 = 256u;

@group(0) @binding(0) var<storage, read> ranges: array<Range>;
@group(0) @binding(1) var<storage, read_write> pool: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let range = ranges[workgroup.y];
    for (var i = WORKGROUP * workgroup.x + lane; i < range.words; i += WORKGROUP * workgroups.x) {
        pool[range.to + i] = pool[range.start + i];
    }
}
