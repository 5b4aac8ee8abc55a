// Writes rows of new tokens to their places in the cache, in its type; the first 2·pairs dims are turned by rotary embedding:
//
//   (x, y) → factor · (x·cos a − y·sin a, y·cos a + x·sin a),  a = position · frequency
//
// in turns: position times a 64-bit fraction of a turn, whole turns dropped by integer overflow, right to 2⁻³² turns at any
// position.
//
// Workgroups (x, y) share a run of tokens, those of z its rows. A lane owns a unit of a row, four pairs or, past those, four
// dims, and goes over rows; it computes the angles of its pairs once a token.

import package::parts::runs::rows;
import package::parts::runs::runs;
import package::parts::runs::run_of;
import package::parts::runs::share_of;
import package::parts::runs::source_of;
import package::parts::runs::target_of;
import package::parts::runs::WORKGROUP;
@binding(2) import package::parts::load_f32 as source;
@binding(3) import package::parts::store_f32 as cache;

// Turns a position, 64-bit fractions: the upper halves of four pairs, their lower halves, and so on.
@group(0) @binding(4) var<storage, read> frequencies: array<vec4<u32>>;

struct Angles {
    cosine: vec4<f32>,
    sine: vec4<f32>,
}

// The upper halves of a·b.
fn high_product(a: u32, b: vec4<u32>) -> vec4<u32> {
    let half = vec4<u32>(16u);
    let a0 = a & 0xffffu;
    let a1 = a >> 16u;
    let b0 = b & vec4<u32>(0xffffu);
    let b1 = b >> half;
    let middle = a1 * b0 + ((a0 * b0) >> half); // < 2³²
    let rest = a0 * b1 + (middle & vec4<u32>(0xffffu));
    return a1 * b1 + (middle >> half) + (rest >> half);
}

// Of turns/2³² of a turn: the nearest quarter, and Taylor polynomials fitted to ±π/4 (Cephes) for the rest.
fn cos_sin(turns: vec4<u32>) -> Angles {
    let quarter = (turns + 0x20000000u) >> vec4<u32>(30u);
    let a = vec4<f32>(bitcast<vec4<i32>>(turns - (quarter << vec4<u32>(30u)))) * 1.4629180792671596e-9; // 2π/2³²
    let z = a * a;
    let sine = a + a * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4));
    let cosine = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5));
    let odd = (quarter & vec4<u32>(1u)) == vec4<u32>(1u);
    let left = ((quarter + 1u) & vec4<u32>(2u)) == vec4<u32>(2u);
    let below = (quarter & vec4<u32>(2u)) == vec4<u32>(2u);
    let x = select(cosine, sine, odd);
    let y = select(sine, cosine, odd);
    return Angles(select(x, -x, left), select(y, -y, below));
}

// Of pairs 4·unit to 4·unit + 3, times the factor.
fn angles_of(position: u32, unit: u32) -> Angles {
    let turns = position * frequencies[2u * unit] + high_product(position, frequencies[2u * unit + 1u]);
    let angles = cos_sin(turns);
    return Angles(rows.factor * angles.cosine, rows.factor * angles.sine);
}

// Turns four pairs. They are eight dims: four from `4·unit` on and those `pairs` further, or interleaved, eight from `8·unit` on.
fn turn(at: u32, to: u32, unit: u32, angles: Angles) {
    let interleaved = rows.interleaved == 1u;
    let first = select(4u, 8u, interleaved) * unit;
    let second = first + select(rows.pairs, 4u, interleaved);
    let left = i32(select(rows.pairs, 2u * rows.pairs, interleaved)) - i32(first);
    let second_left = select(left, left - 4, interleaved);
    let a = source::load4(at + first, left);
    let b = source::load4(at + second, second_left);
    let x = select(a, vec4<f32>(a.xz, b.xz), interleaved);
    let y = select(b, vec4<f32>(a.yw, b.yw), interleaved);
    let u = x * angles.cosine - y * angles.sine;
    let v = y * angles.cosine + x * angles.sine;
    cache::store4(to + first, select(u, vec4<f32>(u.x, v.x, u.y, v.y), interleaved), left);
    if second_left > 0 {
        cache::store4(to + second, select(v, vec4<f32>(u.z, v.z, u.w, v.w), interleaved), second_left);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let index = run_of(workgroup);
    if index >= rows.runs {
        return;
    }
    let run = runs[index];
    let turned = (rows.pairs + 3u) / 4u;
    let units = turned + (rows.dim - 2u * rows.pairs + 3u) / 4u;
    let share = share_of(workgroup.z, lane, units);
    for (var unit = share.unit; unit < units; unit += share.across) {
        let dim = 2u * rows.pairs + 4u * (unit - min(unit, turned)); // of a unit past the pairs
        var token = share.token;
        var head = share.head;
        var angles = Angles();
        for (var i = 0u; i < rows.team_rows && token < run.tokens; i += 1u) {
            let at = source_of(run, token, head);
            let to = target_of(run, token, head);
            if unit < turned {
                if i == 0u || head == 0u {
                    angles = angles_of(run.position + token, unit);
                }
                turn(at, to, unit, angles);
            } else {
                let left = i32(rows.dim) - i32(dim);
                cache::store4(to + dim, source::load4(at + dim, left), left);
            }
            head += 1u;
            if head == rows.heads {
                head = 0u;
                token += 1u;
            }
        }
    }
}
