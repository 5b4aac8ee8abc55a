// Attention over work items of few rows, such as decoding: twin of attention.wgsl for when reading K and V is what takes time.
// The formula, packed rows, items and bindings are the same.
//
// One workgroup does item `workgroup_id.x`, up to ROWS packed rows, for KV head `workgroup_id.y`. A team of TEAM neighbouring
// lanes takes KEYS keys at a time; lane `member` of it has dims 8·(c·TEAM + member) … + 7 of Q, K, V and O, for each chunk c.
// K and V go from memory into registers, 16 bytes a load, once for all rows. Each team goes over keys of its own with an m, l
// and O of its own, in step with the others but without waiting for them; at the end they are merged, row by row.
//
//   for each STEP keys, a team's KEYS of them:
//     s = scale · q·k, summed over the team     → softcap → bias → ALiBi → mask
//     where a maximum grows by more than SLACK: m' = max(m, s), l and O shrink by exp(m − m')
//     p = exp(s − m),  l += Σ p,  O += p·v
//
// Between two updates of m it is stale: p reaches exp(SLACK), which cancels in O / l.

import package::parts::params::params;
import package::parts::params::LEFT_UNLIMITED;
import package::parts::params::RIGHT_UNLIMITED;
import package::parts::params::ALIBI;
import package::parts::params::slope_of;
import package::parts::strides::strides;
import package::parts::plan::Item;
import package::parts::plan::item_at;
import package::parts::exp::exp_below;
import package::parts::tanh::tanh4;
import package::parts::team::sum_over_team;
@binding(4) import package::parts::load_f32 as q;
@binding(5) import package::parts::load_f32 as k;
@binding(6) import package::parts::load_f32 as v;
import package::parts::kv_dense::k_at;
import package::parts::kv_dense::v_at;
import package::parts::bias_none::bias_at;
import package::parts::mask_none::mask_at;
import package::parts::dest_out::put;

const WORKGROUP: u32 = 128u; // lanes
const TEAM: u32 = 8u;        // lanes that share a key
const KEYS: u32 = 2u;        // keys a team takes at a time
const ROW_VECS: u32 = 1u;    // vec4s of rows: 1 or 2
const QK_CHUNKS: u32 = 2u;   // 8·TEAM·QK_CHUNKS ≥ qk_dim
const V_CHUNKS: u32 = 2u;    // 8·TEAM·V_CHUNKS ≥ v_dim: 1, 2 or 4
const QK_FULL: u32 = 0u;     // 1: equal
const V_FULL: u32 = 0u;

const ROWS: u32 = 4u * ROW_VECS;
const TEAMS: u32 = WORKGROUP / TEAM;
const STEP: u32 = TEAMS * KEYS;
const V_VECS: u32 = 2u * V_CHUNKS;
const Q: u32 = ROWS * 2u * QK_CHUNKS;
const O: u32 = ROWS * V_VECS;

const FLT_MAX: f32 = 3.4028234663852886e38;
const SLACK: f32 = 5.5;
const INFINITY: u32 = 0x7f800000u;
const MAGNITUDE: vec4<u32> = vec4<u32>(0x7fffffffu);

var<workgroup> team_m: array<vec4<f32>, TEAMS * ROW_VECS>;
var<workgroup> team_l: array<vec4<f32>, TEAMS * ROW_VECS>;
var<workgroup> team_o: array<vec4<f32>, WORKGROUP * V_VECS>;

fn qk_left(dim: u32) -> i32 {
    return select(i32(params.qk_dim) - i32(dim), 8, QK_FULL == 1u);
}

fn v_left(dim: u32) -> i32 {
    return select(i32(params.v_dim) - i32(dim), 8, V_FULL == 1u);
}

// The teams' outputs of one row, summed and stored. `a` … `h` are the lane's, as many as V_VECS.
fn merge_row(lane: u32, shrink: f32, offset: u32, factor: f32, stored: bool,
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>, e: vec4<f32>, f: vec4<f32>, g: vec4<f32>, h: vec4<f32>) {
    workgroupBarrier(); // the row before is read
    team_o[lane] = a * shrink;
    team_o[WORKGROUP + lane] = b * shrink;
    if V_VECS > 2u {
        team_o[2u * WORKGROUP % (WORKGROUP * V_VECS) + lane] = c * shrink;
        team_o[3u * WORKGROUP % (WORKGROUP * V_VECS) + lane] = d * shrink;
    }
    if V_VECS > 4u {
        team_o[4u * WORKGROUP % (WORKGROUP * V_VECS) + lane] = e * shrink;
        team_o[5u * WORKGROUP % (WORKGROUP * V_VECS) + lane] = f * shrink;
        team_o[6u * WORKGROUP % (WORKGROUP * V_VECS) + lane] = g * shrink;
        team_o[7u * WORKGROUP % (WORKGROUP * V_VECS) + lane] = h * shrink;
    }
    workgroupBarrier();
    for (var i = lane; i < TEAM * V_VECS; i += WORKGROUP) {
        let member = i % TEAM;
        let vec = i / TEAM;
        let dim = 8u * (vec / 2u * TEAM + member) + 4u * (vec % 2u);
        let left = i32(params.v_dim) - i32(dim);
        if stored && left > 0 {
            var sum = team_o[vec * WORKGROUP + member];
            for (var team = 1u; team < TEAMS; team += 1u) {
                sum += team_o[vec * WORKGROUP + team * TEAM + member];
            }
            put(offset + dim, sum * factor, left);
        }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let item = item_at(workgroup.x);
    let kv_head = workgroup.y;
    let team = lane / TEAM;
    let member = lane % TEAM;
    let left_unlimited = (params.flags & LEFT_UNLIMITED) != 0u;
    let right_unlimited = (params.flags & RIGHT_UNLIMITED) != 0u;
    let end = i32(item.kv_end) - 1;

    // Rows past the item's end repeat its last row and are not stored.
    let last_row = item.row_begin + item.row_count - 1u;
    var row: array<vec4<u32>, ROW_VECS>;
    var head: array<vec4<u32>, ROW_VECS>;
    var pos: array<vec4<i32>, ROW_VECS>;
    var low: array<vec4<i32>, ROW_VECS>; // row r sees keys low … high
    var high: array<vec4<i32>, ROW_VECS>;
    var slope: array<vec4<f32>, ROW_VECS>;
    var bias_offset: array<vec4<u32>, ROW_VECS>;
    var mask_offset: array<vec4<u32>, ROW_VECS>;
    var qs: array<vec4<f32>, Q>; // [chunk][row][half]
    for (var g = 0u; g < ROW_VECS; g += 1u) {
        row[g] = min(vec4<u32>(item.row_begin + 4u * g) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last_row));
        let token = row[g] / params.group;
        head[g] = kv_head * params.group + row[g] % params.group;
        pos[g] = item.q_pos + vec4<i32>(token);
        low[g] = select(pos[g] - params.left, vec4<i32>(0), left_unlimited);
        high[g] = min(select(pos[g] + params.right, vec4<i32>(end), right_unlimited), vec4<i32>(end));
        slope[g] = vec4<f32>();
        if (params.flags & ALIBI) != 0u {
            slope[g] = vec4<f32>(slope_of(head[g].x), slope_of(head[g].y), slope_of(head[g].z), slope_of(head[g].w));
        }
        bias_offset[g] = item.bias + token * item.bias_row + head[g] * item.bias_head;
        mask_offset[g] = item.mask + token * item.mask_row + head[g] * item.mask_head;
        let offset = item.q + token * strides.q_seq + head[g] * strides.q_head;
        for (var c = 0u; c < QK_CHUNKS; c += 1u) {
            let dim = 8u * (c * TEAM + member);
            let left = qk_left(dim);
            let x = q::load8(offset.x + dim, left);
            let y = q::load8(offset.y + dim, left);
            let z = q::load8(offset.z + dim, left);
            let w = q::load8(offset.w + dim, left);
            let at = (c * ROW_VECS + g) * 8u;
            qs[at] = x[0];
            qs[at + 1u] = x[1];
            qs[at + 2u] = y[0];
            qs[at + 3u] = y[1];
            qs[at + 4u] = z[0];
            qs[at + 5u] = z[1];
            qs[at + 6u] = w[0];
            qs[at + 7u] = w[1];
        }
    }
    // All rows see all_low … all_high, and only steps beyond that look at masks.
    let first_pos = item.q_pos + i32(item.row_begin / params.group);
    let last_pos = item.q_pos + i32(last_row / params.group);
    let all_low = select(last_pos - params.left, 0, left_unlimited);
    let all_high = min(select(first_pos + params.right, end, right_unlimited), end);

    var o: array<vec4<f32>, O>; // [row][chunk][half]
    for (var i = 0u; i < O; i += 1u) {
        o[i] = vec4<f32>();
    }
    var m: array<vec4<f32>, ROW_VECS>;
    var l: array<vec4<f32>, ROW_VECS>;
    var largest: array<vec4<u32>, ROW_VECS>; // the largest magnitude of a visible score, as bits: a NaN's are above those of ∞
    for (var g = 0u; g < ROW_VECS; g += 1u) {
        m[g] = vec4<f32>(-FLT_MAX);
        l[g] = vec4<f32>();
        largest[g] = vec4<u32>();
    }

    for (var key = item.kv_begin; key < item.kv_end; key += STEP) {
        // Keys past the end repeat the last one: they are masked, and nothing outside the sequence is read.
        var kx: array<mat2x4<f32>, KEYS * QK_CHUNKS>;
        var vx: array<mat2x4<f32>, KEYS * V_CHUNKS>;
        for (var i = 0u; i < KEYS; i += 1u) {
            let j = min(key + i * TEAMS + team, item.kv_end - 1u);
            let k_offset = k_at(item, kv_head, j);
            let v_offset = v_at(item, kv_head, j);
            for (var c = 0u; c < QK_CHUNKS; c += 1u) {
                let dim = 8u * (c * TEAM + member);
                kx[i * QK_CHUNKS + c] = k::load8(k_offset + dim, qk_left(dim));
            }
            for (var c = 0u; c < V_CHUNKS; c += 1u) {
                let dim = 8u * (c * TEAM + member);
                vx[i * V_CHUNKS + c] = v::load8(v_offset + dim, v_left(dim));
            }
        }

        let edge = BIAS || MASK || i32(key) < all_low || i32(key + STEP) - 1 > all_high;
        var s: array<vec4<f32>, KEYS * ROW_VECS>;
        var seen: array<vec4<bool>, KEYS * ROW_VECS>;
        for (var g = 0u; g < ROW_VECS; g += 1u) {
            var step_max = vec4<f32>(-FLT_MAX);
            for (var i = 0u; i < KEYS; i += 1u) {
                var ax = vec4<f32>();
                var ay = vec4<f32>();
                var az = vec4<f32>();
                var aw = vec4<f32>();
                for (var c = 0u; c < QK_CHUNKS; c += 1u) {
                    let at = (c * ROW_VECS + g) * 8u;
                    let x = kx[i * QK_CHUNKS + c];
                    ax += qs[at] * x[0];
                    ay += qs[at + 2u] * x[0];
                    az += qs[at + 4u] * x[0];
                    aw += qs[at + 6u] * x[0];
                    ax += qs[at + 1u] * x[1];
                    ay += qs[at + 3u] * x[1];
                    az += qs[at + 5u] * x[1];
                    aw += qs[at + 7u] * x[1];
                }
                let part = vec4<f32>(ax.x + ax.y + ax.z + ax.w, ay.x + ay.y + ay.z + ay.w, az.x + az.y + az.z + az.w, aw.x + aw.y + aw.z + aw.w);
                var x = sum_over_team(part, lane) * params.scale;

                let j = key + i * TEAMS + team;
                var magnitude = bitcast<vec4<u32>>(x) & MAGNITUDE;
                if params.softcap > 0.0 {
                    x = params.softcap * tanh4(x / params.softcap);
                }
                var visible = vec4<bool>(true);
                if edge {
                    let jj = vec4<i32>(i32(j));
                    visible = (jj >= low[g]) & (jj <= high[g]);
                    // Options are read for the last key again where there is none, and ignored.
                    let known = min(j, item.kv_end - 1u);
                    if BIAS {
                        let bias = bias_at(bias_offset[g] + known * strides.bias_key);
                        x += bias;
                        magnitude = max(magnitude, bitcast<vec4<u32>>(x) & MAGNITUDE);
                        visible &= bitcast<vec4<u32>>(bias) != vec4<u32>(0xff800000u); // a bias of −∞ is a mask
                    }
                    if MASK {
                        visible &= mask_at(mask_offset[g], known * strides.mask_key);
                    }
                }
                if (params.flags & ALIBI) != 0u {
                    x -= slope[g] * abs(vec4<f32>(pos[g] - vec4<i32>(i32(j))));
                }
                largest[g] = max(largest[g], select(vec4<u32>(), magnitude, visible));
                // Visible scores stay finite below: a sum that overflowed counts as the lowest finite one.
                x = select(x, vec4<f32>(-FLT_MAX), (x < vec4<f32>(-FLT_MAX)) | !visible);
                step_max = max(step_max, x);
                s[i * ROW_VECS + g] = x;
                seen[i * ROW_VECS + g] = visible;
            }
            if any(step_max - SLACK > m[g]) {
                let m_new = max(m[g], step_max);
                let keep = exp_below(m[g] - m_new);
                m[g] = m_new;
                l[g] *= keep;
                for (var i = 0u; i < V_VECS; i += 1u) {
                    o[(4u * g) * V_VECS + i] *= keep.x;
                    o[(4u * g + 1u) * V_VECS + i] *= keep.y;
                    o[(4u * g + 2u) * V_VECS + i] *= keep.z;
                    o[(4u * g + 3u) * V_VECS + i] *= keep.w;
                }
            }
            for (var i = 0u; i < KEYS; i += 1u) {
                let visible = seen[i * ROW_VECS + g];
                let p = select(vec4<f32>(), exp_below(s[i * ROW_VECS + g] - m[g]), visible);
                l[g] += p;
                for (var c = 0u; c < V_CHUNKS; c += 1u) {
                    let x = vx[i * V_CHUNKS + c];
                    let at = 4u * g * V_VECS + 2u * c;
                    if edge {
                        // 0 · NaN is NaN: what a row does not see is left out, not multiplied by zero.
                        o[at] += select(vec4<f32>(), p.x * x[0], visible.x);
                        o[at + 1u] += select(vec4<f32>(), p.x * x[1], visible.x);
                        o[at + V_VECS] += select(vec4<f32>(), p.y * x[0], visible.y);
                        o[at + V_VECS + 1u] += select(vec4<f32>(), p.y * x[1], visible.y);
                        o[at + 2u * V_VECS] += select(vec4<f32>(), p.z * x[0], visible.z);
                        o[at + 2u * V_VECS + 1u] += select(vec4<f32>(), p.z * x[1], visible.z);
                        o[at + 3u * V_VECS] += select(vec4<f32>(), p.w * x[0], visible.w);
                        o[at + 3u * V_VECS + 1u] += select(vec4<f32>(), p.w * x[1], visible.w);
                    } else {
                        o[at] += p.x * x[0];
                        o[at + 1u] += p.x * x[1];
                        o[at + V_VECS] += p.y * x[0];
                        o[at + V_VECS + 1u] += p.y * x[1];
                        o[at + 2u * V_VECS] += p.z * x[0];
                        o[at + 2u * V_VECS + 1u] += p.z * x[1];
                        o[at + 3u * V_VECS] += p.w * x[0];
                        o[at + 3u * V_VECS + 1u] += p.w * x[1];
                    }
                }
            }
        }
    }

    // The teams' maxima, then their sums under the common one.
    for (var g = 0u; g < ROW_VECS; g += 1u) {
        if member == 0u {
            team_m[team * ROW_VECS + g] = m[g];
        }
    }
    workgroupBarrier();
    var all_m: array<vec4<f32>, ROW_VECS>;
    var shrink: array<vec4<f32>, ROW_VECS>;
    for (var g = 0u; g < ROW_VECS; g += 1u) {
        all_m[g] = team_m[g];
        for (var i = 1u; i < TEAMS; i += 1u) {
            all_m[g] = max(all_m[g], team_m[i * ROW_VECS + g]);
        }
        shrink[g] = exp_below(m[g] - all_m[g]);
        if member == 0u {
            // A row with a NaN gets an `l` that is not finite, which the last step makes NaN of.
            let lost = select(vec4<u32>(), vec4<u32>(INFINITY), largest[g] > vec4<u32>(INFINITY));
            team_l[team * ROW_VECS + g] = bitcast<vec4<f32>>(bitcast<vec4<u32>>(l[g] * shrink[g]) | lost);
        }
    }
    workgroupBarrier();
    for (var g = 0u; g < ROW_VECS; g += 1u) {
        var all_l = team_l[g];
        for (var i = 1u; i < TEAMS; i += 1u) {
            all_l += team_l[i * ROW_VECS + g];
        }
        let stored = vec4<u32>(item.row_begin + 4u * g) + vec4<u32>(0u, 1u, 2u, 3u) <= vec4<u32>(last_row);
        let done = finish4(item, kv_head, row[g], head[g], all_m[g], all_l, stored & vec4<bool>(lane == 0u));
        let at = 4u * g * V_VECS;
        merge_row(lane, shrink[g].x, done.offset.x, done.factor.x, stored.x,
            o[at], o[at + 1u], o[(at + 2u) % O], o[(at + 3u) % O], o[(at + 4u) % O], o[(at + 5u) % O], o[(at + 6u) % O], o[(at + 7u) % O]);
        let at1 = at + V_VECS;
        merge_row(lane, shrink[g].y, done.offset.y, done.factor.y, stored.y,
            o[at1], o[at1 + 1u], o[(at1 + 2u) % O], o[(at1 + 3u) % O], o[(at1 + 4u) % O], o[(at1 + 5u) % O], o[(at1 + 6u) % O], o[(at1 + 7u) % O]);
        let at2 = at1 + V_VECS;
        merge_row(lane, shrink[g].z, done.offset.z, done.factor.z, stored.z,
            o[at2], o[at2 + 1u], o[(at2 + 2u) % O], o[(at2 + 3u) % O], o[(at2 + 4u) % O], o[(at2 + 5u) % O], o[(at2 + 6u) % O], o[(at2 + 7u) % O]);
        let at3 = at2 + V_VECS;
        merge_row(lane, shrink[g].w, done.offset.w, done.factor.w, stored.w,
            o[at3], o[at3 + 1u], o[(at3 + 2u) % O], o[(at3 + 3u) % O], o[(at3 + 4u) % O], o[(at3 + 5u) % O], o[(at3 + 6u) % O], o[(at3 + 7u) % O]);
    }
}
