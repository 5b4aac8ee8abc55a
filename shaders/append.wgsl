// Writes rows of new tokens to their places in the cache, in its type; the first 2·pairs dims are turned by rotary embedding:
//
//   (x, y) → factor · (x·cos a − y·sin a, y·cos a + x·sin a),  a = position · frequency
//
// in turns: position times a 64-bit fraction of a turn, whole turns dropped by integer overflow, exact at any position.
//
// Workgroups (x, y) share a run of tokens, those of z its cells (token, head, four dims); a lane takes every
// (WORKGROUP · workgroups)th and reads its dims and, half-split, those that make pairs with them.

import package::parts::runs::rows;
import package::parts::runs::runs;
import package::parts::runs::run_of;
import package::parts::runs::source_of;
import package::parts::runs::target_of;
import package::parts::runs::WORKGROUP;
@binding(2) import package::parts::load_f32 as source;
@binding(3) import package::parts::store_f32 as cache;

// Turns a position of each pair: upper and lower half of a 64-bit fraction.
@group(0) @binding(4) var<storage, read> frequencies: array<vec2<u32>>;

// The upper half of a·b.
fn high_product(a: u32, b: u32) -> u32 {
    let a0 = a & 0xffffu;
    let a1 = a >> 16u;
    let b0 = b & 0xffffu;
    let b1 = b >> 16u;
    let middle = a1 * b0 + ((a0 * b0) >> 16u); // < 2³²
    let rest = a0 * b1 + (middle & 0xffffu);
    return a1 * b1 + (middle >> 16u) + (rest >> 16u);
}

// Cosine and sine of turns/2³² of a turn: to the nearest quarter, then by Taylor polynomials fitted to ±π/4 (Cephes).
fn cos_sin(turns: u32) -> vec2<f32> {
    let quarter = (turns + 0x20000000u) >> 30u;
    let a = f32(bitcast<i32>(turns - (quarter << 30u))) * 1.4629180792671596e-9; // 2π/2³²
    let z = a * a;
    let sine = a + a * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4));
    let cosine = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5));
    switch quarter & 3u {
        case 0u: { return vec2<f32>(cosine, sine); }
        case 1u: { return vec2<f32>(-sine, cosine); }
        case 2u: { return vec2<f32>(-cosine, -sine); }
        default: { return vec2<f32>(sine, -cosine); }
    }
}

// Dim `dim` of a row: `x` is its value and `other` that of the other dim of its pair.
fn turned(dim: u32, x: f32, other: f32, position: u32) -> f32 {
    if dim >= 2u * rows.pairs {
        return x;
    }
    let interleaved = rows.interleaved == 1u;
    let pair = select(dim % max(rows.pairs, 1u), dim / 2u, interleaved);
    let second = select(dim >= rows.pairs, (dim & 1u) == 1u, interleaved);
    let frequency = frequencies[pair];
    let unit = rows.factor * cos_sin(position * frequency.x + high_product(position, frequency.y));
    return x * unit.x + select(-other, other, second) * unit.y;
}

// Four dims from `dim` on of the row at `at`, where each dim is the other one of its pair; zeros where there is none.
fn others(at: u32, dim: u32, left: i32, x: vec4<f32>) -> vec4<f32> {
    let rotary = 2u * rows.pairs;
    if dim >= rotary {
        return vec4<f32>();
    }
    if rows.interleaved == 1u {
        return x.yxwz;
    }
    if rows.pairs % 4u == 0u { // all four on one side
        return source::load4(at + select(dim + rows.pairs, dim - rows.pairs, dim >= rows.pairs), left);
    }
    var other = vec4<f32>();
    for (var i = 0u; i < 4u; i += 1u) {
        let d = dim + i;
        if d < rotary {
            other[i] = source::load4(at + select(d + rows.pairs, d - rows.pairs, d >= rows.pairs), 1).x;
        }
    }
    return other;
}

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = run_of(workgroup);
    if index >= rows.runs {
        return;
    }
    let run = runs[index];
    let fours = (rows.dim + 3u) / 4u;
    let row = rows.heads * fours;
    for (var i = WORKGROUP * workgroup.z + lane; i < run.tokens * row; i += WORKGROUP * workgroups.z) {
        let token = i / row;
        let head = i % row / fours;
        let dim = 4u * (i % fours);
        let left = i32(rows.dim) - i32(dim);
        let at = source_of(run, token, head);
        let position = run.position + token;
        let x = source::load4(at + dim, left);
        let other = others(at, dim, left, x);
        let y = vec4<f32>(
            turned(dim, x.x, other.x, position),
            turned(dim + 1u, x.y, other.y, position),
            turned(dim + 2u, x.z, other.z, position),
            turned(dim + 3u, x.w, other.w, position),
        );
        cache::store4(target_of(run, token, head) + dim, y, left);
    }
}
