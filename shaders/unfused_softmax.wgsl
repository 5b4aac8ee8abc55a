// Second pass of the unfused attention, in place: P = exp(S − max S) over the keys a row sees, and its factor 1 / Σ P.
// Leaving the division to the third pass saves one reading and one writing of P.
//
// One workgroup does row `workgroup_id.x` (65,535 more for each `.y`) of plane `.z`; a lane takes every WORKGROUP-th vec4.

import package::parts::exp::exp_below;
import package::parts::unfused::key_end;

const WORKGROUP: u32 = 128u;
const FLT_MAX: f32 = 3.4028234663852886e38;

@group(0) @binding(1) var<storage, read_write> scores: array<vec4<f32>>;

var<workgroup> values: array<f32, WORKGROUP>;

fn workgroup_max(value: f32, lane: u32) -> f32 {
    values[lane] = value;
    for (var width = WORKGROUP / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if lane < width {
            values[lane] = max(values[lane], values[lane + width]);
        }
    }
    workgroupBarrier();
    return values[0];
}

fn workgroup_sum(value: f32, lane: u32) -> f32 {
    values[lane] = value;
    for (var width = WORKGROUP / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if lane < width {
            values[lane] += values[lane + width];
        }
    }
    workgroupBarrier();
    return values[0];
}

fn seen(column: u32, end: u32) -> vec4<bool> {
    return vec4<u32>(4u * column) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(end);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = workgroup.x + 65535u * workgroup.y;
    if row >= params.rows {
        return;
    }
    let first = (workgroup.z * params.rows + row) * params.pitch;
    let end = key_end(row);
    let columns = (end + 3u) / 4u;

    var top = vec4<f32>(-FLT_MAX);
    for (var i = lane; i < columns; i += WORKGROUP) {
        top = max(top, select(vec4<f32>(-FLT_MAX), scores[first + i], seen(i, end)));
    }
    let m = workgroup_max(max(max(top.x, top.y), max(top.z, top.w)), lane);
    workgroupBarrier(); // all have read the maximum

    var total = vec4<f32>();
    for (var i = lane; i < columns; i += WORKGROUP) {
        let p = select(vec4<f32>(), exp_below(scores[first + i] - m), seen(i, end));
        scores[first + i] = p;
        total += p;
    }
    let l = workgroup_sum(total.x + total.y + total.z + total.w, lane);
    if lane == 0u {
        scores[first + params.pitch - 1u] = vec4<f32>(select(1.0 / l, 0.0, l == 0.0));
    }
}
