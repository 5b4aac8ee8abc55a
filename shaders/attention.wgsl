// Attention over work items: O = softmax(f(scale · Q·Kᵀ)) · V in one pass over the keys (online softmax, FlashAttention).
//
// A *packed row* is one query token with one of the `group` query heads that share a KV head: row = token · group + member,
// so K and V are read once for the whole group. An *item* is up to TILE_Q packed rows of one sequence against a range of keys.
//
// One workgroup does item `workgroup_id.x` for KV head `workgroup_id.y`. A team of TEAM neighbouring lanes owns 4 rows:
// every vec4 of scores, weights and sums holds those 4 rows, a lane has 4·KEY_VECS keys of a step and 4·V_VECS value dims.
//
//   for each TILE_K keys:
//     S = scale · Q·Kᵀ          DIM_STEP dims of Q and K at a time, transposed in `stage`; outer products in registers
//     S → softcap → bias → ALiBi → mask
//     m' = max(m, max S),  P = exp(S − m'),  l = l·exp(m − m') + Σ P,  O = O·exp(m − m')
//     O += P·V                  KEY_STEP keys of V at a time in `stage`, P through `weights`
//
// The definition, with every edge case, stands in the docs of `src/ops/attention/mod.rs`; items are made in `schedule.rs` there.

import package::parts::params::params;
import package::parts::strides::strides;
import package::parts::plan::Item;
import package::parts::plan::item_at;
import package::parts::exp::exp_below;
import package::parts::tanh::tanh4;
import package::parts::reduce::team_max;
import package::parts::reduce::team_sum;
@binding(4) import package::parts::load_f32 as q;
@binding(5) import package::parts::load_f32 as k;
@binding(6) import package::parts::load_f32 as v;
import package::parts::kv_dense::k_at;
import package::parts::kv_dense::v_at;
import package::parts::bias_none::bias_at;
import package::parts::mask_none::mask_at;
import package::parts::dest_out::put;

const WORKGROUP: u32 = 128u; // lanes
const TEAM: u32 = 8u;        // lanes that share 4 rows
const KEY_VECS: u32 = 1u;    // vec4s of keys a lane scores in a step
const V_VECS: u32 = 4u;      // vec4s of value dims a lane accumulates: 1, 2, 4 or 8; v_dim ≤ 4·V_VECS·TEAM
const DIM_STEP: u32 = 8u;    // dims of Q and K staged at a time, a multiple of 4
const KEY_STEP: u32 = 8u;    // keys of V staged at a time, a divisor of TILE_K
const SPELLED: u32 = 0u;     // 1: the final stores are spelled out, 0: a loop

const TEAMS: u32 = WORKGROUP / TEAM;
const TILE_Q: u32 = 4u * TEAMS;
const KEYS: u32 = 4u * KEY_VECS;
const TILE_K: u32 = KEYS * TEAM;
const O: u32 = 4u * V_VECS;
const V_COLUMNS: u32 = V_VECS * TEAM;
// A staged dim: TEAMS vec4s of rows, then TILE_K / 4 vec4s of keys. The odd vec4 spreads a transposed store over banks.
const STAGE_PITCH: u32 = TEAMS + TILE_K / 4u + 1u;
const STAGE: u32 = max(DIM_STEP * STAGE_PITCH, KEY_STEP * V_COLUMNS);
const WEIGHTS_PITCH: u32 = TEAMS + 1u;

const FLT_MAX: f32 = 3.4028234663852886e38;
const UNSEEN: f32 = -1.0; // in `weights`: this row does not see this key
const INFINITY: u32 = 0x7f800000u;
const MAGNITUDE: vec4<u32> = vec4<u32>(0x7fffffffu);

var<workgroup> stage: array<vec4<f32>, STAGE>;
var<workgroup> weights: array<vec4<f32>, TILE_K * WEIGHTS_PITCH>;
var<workgroup> row_offsets: array<vec4<u32>, TEAMS>; // of Q's rows, in elements

// Loads DIM_STEP dims from `dim` on of all rows of the tile and of TILE_K keys from `key` on, in 4×4 blocks, transposed.
// Keys past the end repeat the last one: they are masked, and nothing outside the sequence is read.
fn stage_q_and_k(item: Item, kv_head: u32, key: u32, dim: u32, lane: u32) {
    let columns = DIM_STEP / 4u;
    for (var b = lane; b < columns * (TEAMS + TILE_K / 4u); b += WORKGROUP) {
        let column = b % columns;
        let four = b / columns;
        let d = dim + 4u * column;
        let left = i32(params.qk_dim) - i32(d);
        var block: mat4x4<f32>;
        if four < TEAMS {
            let offset = row_offsets[four] + d;
            block = mat4x4<f32>(q::load4(offset.x, left), q::load4(offset.y, left), q::load4(offset.z, left), q::load4(offset.w, left));
        } else {
            let j = min(vec4<u32>(key + 4u * (four - TEAMS)) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(item.kv_end - 1u));
            let offset = vec4<u32>(k_at(item, kv_head, j.x), k_at(item, kv_head, j.y), k_at(item, kv_head, j.z), k_at(item, kv_head, j.w)) + d;
            block = mat4x4<f32>(k::load4(offset.x, left), k::load4(offset.y, left), k::load4(offset.z, left), k::load4(offset.w, left));
        }
        let turned = transpose(block);
        let at = 4u * column * STAGE_PITCH + four;
        stage[at] = turned[0];
        stage[at + STAGE_PITCH] = turned[1];
        stage[at + 2u * STAGE_PITCH] = turned[2];
        stage[at + 3u * STAGE_PITCH] = turned[3];
    }
}

fn stage_v(item: Item, kv_head: u32, key: u32, lane: u32) {
    for (var b = lane; b < KEY_STEP * V_COLUMNS; b += WORKGROUP) {
        let j = min(key + b / V_COLUMNS, item.kv_end - 1u);
        let d = 4u * (b % V_COLUMNS);
        stage[b] = v::load4(v_at(item, kv_head, j) + d, i32(params.v_dim) - i32(d));
    }
}

// Stores dims `dim` … `dim + 3` of the lane's 4 rows, which are the columns of `block`'s transpose.
fn store(done: Done, stored: vec4<bool>, dim: u32, block: mat4x4<f32>) {
    let left = i32(params.v_dim) - i32(dim);
    if left > 0 {
        let f = done.factor;
        let rows = transpose(mat4x4<f32>(block[0] * f, block[1] * f, block[2] * f, block[3] * f));
        if stored.x { put(done.offset.x + dim, rows[0], left); }
        if stored.y { put(done.offset.y + dim, rows[1], left); }
        if stored.z { put(done.offset.z + dim, rows[2], left); }
        if stored.w { put(done.offset.w + dim, rows[3], left); }
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let item = item_at(workgroup.x);
    let kv_head = workgroup.y;
    let team = lane / TEAM;
    let member = lane % TEAM;

    // The lane's 4 rows; those past the item's end repeat its last row and are not stored.
    let last_row = item.row_begin + item.row_count - 1u;
    let row = min(vec4<u32>(item.row_begin + 4u * team) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last_row));
    let token = row / params.group;
    let head = kv_head * params.group + row % params.group;
    if member == 0u {
        row_offsets[team] = item.q + token * strides.q_seq + head * strides.q_head;
    }
    let bias_offset = item.bias + token * item.bias_row + head * item.bias_head;
    let mask_offset = item.mask + token * item.mask_row + head * item.mask_head;

    // Row r sees keys low[r] … high[r]; all rows of the tile see all_low … all_high, and only steps beyond that look at masks.
    let left_unlimited = (params.flags & LEFT_UNLIMITED) != 0u;
    let right_unlimited = (params.flags & RIGHT_UNLIMITED) != 0u;
    let end = i32(item.kv_end) - 1;
    let pos = item.q_pos + vec4<i32>(token);
    let low = select(pos - params.left, vec4<i32>(0), left_unlimited);
    let high = min(select(pos + params.right, vec4<i32>(end), right_unlimited), vec4<i32>(end));
    let first_pos = item.q_pos + i32(item.row_begin / params.group);
    let last_pos = item.q_pos + i32(last_row / params.group);
    let all_low = select(last_pos - params.left, 0, left_unlimited);
    let all_high = min(select(first_pos + params.right, end, right_unlimited), end);

    var slope = vec4<f32>();
    if (params.flags & ALIBI) != 0u {
        slope = vec4<f32>(slope_of(head.x), slope_of(head.y), slope_of(head.z), slope_of(head.w));
    }

    var o: array<vec4<f32>, O>;
    for (var i = 0u; i < O; i += 1u) {
        o[i] = vec4<f32>();
    }
    var m = vec4<f32>(-FLT_MAX);
    var l = vec4<f32>();
    // The largest magnitude of a visible score, as bits: above those of ∞ it is a NaN. Compilers may assume that floats are
    // none (one makes a `max` of a `select`, and 0 of NaN), of integers they may not.
    var largest = vec4<u32>();

    for (var key = item.kv_begin; key < item.kv_end; key += TILE_K) {
        var s: array<vec4<f32>, KEYS>;
        for (var i = 0u; i < KEYS; i += 1u) {
            s[i] = vec4<f32>();
        }
        for (var dim = 0u; dim < params.qk_dim; dim += DIM_STEP) {
            workgroupBarrier(); // the last readers of `stage` are done; `row_offsets` is written
            stage_q_and_k(item, kv_head, key, dim, lane);
            workgroupBarrier();
            for (var d = 0u; d < DIM_STEP; d += 1u) {
                let a = stage[d * STAGE_PITCH + team];
                for (var i = 0u; i < KEY_VECS; i += 1u) {
                    let b = stage[d * STAGE_PITCH + TEAMS + i * TEAM + member];
                    s[4u * i] += a * b.x;
                    s[4u * i + 1u] += a * b.y;
                    s[4u * i + 2u] += a * b.z;
                    s[4u * i + 3u] += a * b.w;
                }
            }
        }

        let edge = BIAS || MASK || i32(key) < all_low || i32(key + TILE_K) - 1 > all_high;
        var seen: array<vec4<bool>, KEYS>;
        var step_max = vec4<f32>(-FLT_MAX);
        for (var i = 0u; i < KEYS; i += 1u) {
            let j = key + 4u * (i / 4u * TEAM + member) + i % 4u;
            var x = s[i] * params.scale;
            var magnitude = bitcast<vec4<u32>>(x) & MAGNITUDE;
            if params.softcap > 0.0 {
                x = params.softcap * tanh4(x / params.softcap);
            }
            seen[i] = vec4<bool>(true);
            if edge {
                let jj = vec4<i32>(i32(j));
                seen[i] = (jj >= low) & (jj <= high);
                // Options are read for the last key again where there is none, and ignored.
                let known = min(j, item.kv_end - 1u);
                if BIAS {
                    let bias = bias_at(bias_offset + known * strides.bias_key);
                    x += bias;
                    magnitude = max(magnitude, bitcast<vec4<u32>>(x) & MAGNITUDE);
                    seen[i] &= bitcast<vec4<u32>>(bias) != vec4<u32>(0xff800000u); // a bias of −∞ is a mask
                }
                if MASK {
                    seen[i] &= mask_at(mask_offset, known * strides.mask_key);
                }
            }
            if (params.flags & ALIBI) != 0u {
                x -= slope * abs(vec4<f32>(pos - vec4<i32>(i32(j))));
            }
            largest = max(largest, select(vec4<u32>(), magnitude, seen[i]));
            // Visible scores stay finite below: a sum that overflowed counts as the lowest finite one.
            x = select(x, vec4<f32>(-FLT_MAX), (x < vec4<f32>(-FLT_MAX)) | !seen[i]);
            s[i] = x;
            step_max = max(step_max, x);
        }

        let m_new = max(m, team_max(step_max, lane));
        let keep = exp_below(m - m_new);
        m = m_new;
        l *= keep;
        for (var i = 0u; i < KEYS; i += 1u) {
            let p = exp_below(s[i] - m);
            l += select(vec4<f32>(), p, seen[i]);
            weights[(4u * (i / 4u * TEAM + member) + i % 4u) * WEIGHTS_PITCH + team] = select(vec4<f32>(UNSEEN), p, seen[i]);
        }
        for (var i = 0u; i < O; i += 1u) {
            o[i] *= keep;
        }

        let step_end = min(key + TILE_K, item.kv_end);
        for (var first = key; first < step_end; first += KEY_STEP) {
            workgroupBarrier(); // `stage` is free, `weights` is written
            stage_v(item, kv_head, first, lane);
            workgroupBarrier();
            for (var j = 0u; j < KEY_STEP; j += 1u) {
                let p = weights[(first - key + j) * WEIGHTS_PITCH + team];
                if edge {
                    // 0 · NaN is NaN: what a row does not see is left out, not multiplied by zero.
                    let use_it = p >= vec4<f32>();
                    for (var i = 0u; i < V_VECS; i += 1u) {
                        let x = stage[j * V_COLUMNS + i * TEAM + member];
                        o[4u * i] += select(vec4<f32>(), p * x.x, use_it);
                        o[4u * i + 1u] += select(vec4<f32>(), p * x.y, use_it);
                        o[4u * i + 2u] += select(vec4<f32>(), p * x.z, use_it);
                        o[4u * i + 3u] += select(vec4<f32>(), p * x.w, use_it);
                    }
                } else {
                    for (var i = 0u; i < V_VECS; i += 1u) {
                        let x = stage[j * V_COLUMNS + i * TEAM + member];
                        o[4u * i] += p * x.x;
                        o[4u * i + 1u] += p * x.y;
                        o[4u * i + 2u] += p * x.z;
                        o[4u * i + 3u] += p * x.w;
                    }
                }
            }
        }
    }

    // A row with a NaN gets an `l` that is not finite, which the last step makes NaN of.
    l = bitcast<vec4<f32>>(bitcast<vec4<u32>>(l) | select(vec4<u32>(), vec4<u32>(INFINITY), largest > vec4<u32>(INFINITY)));
    l = team_sum(l, lane);
    let stored = vec4<u32>(item.row_begin + 4u * team) + vec4<u32>(0u, 1u, 2u, 3u) <= vec4<u32>(last_row);
    let done = finish4(item, kv_head, row, head, m, l, stored & vec4<bool>(member == 0u));
    // `o` must never be indexed at run time, or it leaves the registers for the whole kernel. Some compilers unroll the loop
    // below, and the kernel is 15 % faster for it (H200); others find it too long (lavapipe, 2× slower).
    if SPELLED == 0u {
        for (var i = 0u; i < V_VECS; i += 1u) {
            let block = mat4x4<f32>(o[4u * i], o[4u * i + 1u], o[4u * i + 2u], o[4u * i + 3u]);
            store(done, stored, 4u * (i * TEAM + member), block);
        }
        return;
    }
    store(done, stored, 4u * member, mat4x4<f32>(o[0], o[1], o[2], o[3]));
    if V_VECS > 1u {
        store(done, stored, 4u * (TEAM + member), mat4x4<f32>(o[4u % O], o[5u % O], o[6u % O], o[7u % O]));
    }
    if V_VECS > 2u {
        store(done, stored, 4u * (2u * TEAM + member), mat4x4<f32>(o[8u % O], o[9u % O], o[10u % O], o[11u % O]));
        store(done, stored, 4u * (3u * TEAM + member), mat4x4<f32>(o[12u % O], o[13u % O], o[14u % O], o[15u % O]));
    }
    if V_VECS > 4u {
        store(done, stored, 4u * (4u * TEAM + member), mat4x4<f32>(o[16u % O], o[17u % O], o[18u % O], o[19u % O]));
        store(done, stored, 4u * (5u * TEAM + member), mat4x4<f32>(o[20u % O], o[21u % O], o[22u % O], o[23u % O]));
        store(done, stored, 4u * (6u * TEAM + member), mat4x4<f32>(o[24u % O], o[25u % O], o[26u % O], o[27u % O]));
        store(done, stored, 4u * (7u * TEAM + member), mat4x4<f32>(o[28u % O], o[29u % O], o[30u % O], o[31u % O]));
    }
}
