//! The variant rows of attention, and what each is linked from.

use crate::caps::{Caps, Needs};
use crate::kernel::Variant;
use crate::ops::attention::{AttentionDesc, MaskKind};
use crate::shader::Link;
use crate::view::{DType, Width};

/// A row: name, needs, largest V dim, then WORKGROUP, TEAM, KEY_VECS, DIM_STEP, KEY_STEP of `attention.wgsl`. In the name,
/// `.short.` or `.tall.` says which form it is; the rest is for people. A row with other parts than these is a `Variant`
/// written out, with its `swaps`.
macro_rules! variant {
    ($name:literal, $needs:expr, $v_dim:literal, $workgroup:literal, $team:literal, $key_vecs:literal, $dims:literal, $keys:literal) => {
        Variant {
            name: $name,
            needs: $needs,
            swaps: if $needs.subgroup_min > 0 { &[("reduce", "reduce_subgroup")] } else { &[] },
            values: {
                const {
                    let tile_k = 4 * $key_vecs * $team;
                    assert!($v_dim <= 32 * $team, "a lane accumulates 32 dims of V at most");
                    assert!(($team as u32).is_power_of_two() && $workgroup % $team == 0);
                    assert!($dims % 4 == 0 && tile_k % $keys == 0);
                };
                &[
                    ("WORKGROUP", $workgroup),
                    ("TEAM", $team),
                    ("KEY_VECS", $key_vecs),
                    ("DIM_STEP", $dims),
                    ("KEY_STEP", $keys),
                    ("SPELLED", ($team == 4) as u32),
                ]
            },
            suits: |desc| desc.v_dim() <= $v_dim,
            // Teams of 4 win where subgroups are that small (lavapipe 20 %, SwiftShader 40 %), and lose on GPUs.
            rank: |caps| match caps.subgroup {
                Some((_, max)) if $team == 4 && max <= 8 => 0,
                _ => 1,
            },
        }
    };
}

/// A row of `attention_decode.wgsl`: name, needs, largest dim, then WORKGROUP, TEAM, KEYS, ROW_VECS.
macro_rules! decode {
    ($name:literal, $needs:expr, $dim:literal, $workgroup:literal, $team:literal, $keys:literal, $row_vecs:literal) => {
        Variant {
            name: $name,
            needs: $needs,
            swaps: if $needs.subgroup_min > 0 { &[("team", "team_subgroup")] } else { &[] },
            values: {
                const {
                    assert!($dim <= 32 * $team, "a lane has 32 dims of V at most");
                    assert!(($team as u32).is_power_of_two() && $workgroup % $team == 0);
                };
                &[("WORKGROUP", $workgroup), ("TEAM", $team), ("KEYS", $keys), ("ROW_VECS", $row_vecs)]
            },
            suits: |desc| desc.head_dim <= $dim && desc.v_dim() <= $dim && (desc.group() <= 4 || $row_vecs > 1),
            rank: |caps| match caps.subgroup {
                Some((_, max)) if $team == 4 && max <= 8 => 0,
                _ => 1,
            },
        }
    };
}

/// The rows, best first within each form; `decode` serves up to 8 packed rows, `short` up to 16, `tall` more.
pub fn variants() -> Vec<Variant<AttentionDesc>> {
    // Measured on the H200, f16, d 128: 23 TFLOP/s with 16 dims a stage, 20 with 8; 16 with 64 keys a step.
    vec![
        variant!("attention.tall.subgroup8.q64k32", Needs::subgroup(8), 128, 128, 8, 1, 16, 8),
        variant!("attention.tall.subgroup16.q32k64", Needs::subgroup(16), 256, 128, 16, 1, 16, 4),
        variant!("attention.tall.subgroup4.q32k64", Needs::subgroup(4), 128, 32, 4, 4, 16, 8),
        variant!("attention.tall.subgroup4.q64k32", Needs::subgroup(4), 128, 64, 4, 2, 8, 8),
        variant!("attention.tall.portable.q64k32", Needs::NONE, 128, 128, 8, 1, 8, 8),
        variant!("attention.tall.portable.q32k64", Needs::NONE, 256, 128, 16, 1, 8, 4),
        variant!("attention.tall.portable.q16k64", Needs::NONE, 512, 64, 16, 1, 8, 4),
        variant!("attention.short.subgroup16.q16k64", Needs::subgroup(16), 512, 64, 16, 1, 8, 4),
        variant!("attention.short.subgroup8.q16k64", Needs::subgroup(8), 256, 32, 8, 2, 8, 4),
        variant!("attention.short.subgroup4.q16k64", Needs::subgroup(4), 128, 16, 4, 4, 8, 4),
        variant!("attention.short.portable.q16k64", Needs::NONE, 512, 64, 16, 1, 8, 4),
        decode!("attention.decode.subgroup8.q4", Needs::subgroup(8), 128, 128, 8, 2, 1),
        decode!("attention.decode.subgroup16.q8", Needs::subgroup(16), 128, 128, 16, 2, 2),
        decode!("attention.decode.subgroup16.q4", Needs::subgroup(16), 256, 128, 16, 2, 1),
        decode!("attention.decode.subgroup4.q4", Needs::subgroup(4), 128, 64, 4, 1, 1),
        decode!("attention.decode.portable.q4", Needs::NONE, 256, 64, 16, 2, 1),
        decode!("attention.decode.portable.q8", Needs::NONE, 256, 64, 16, 2, 2),
    ]
}

/// Packed rows of the highest decoding tiles.
pub(super) const MAX_DECODE_ROWS: u32 = 8;

/// Which tiles a row is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    Decode,
    Short,
    Tall,
}

impl Form {
    pub(super) const ALL: [Form; 3] = [Form::Decode, Form::Short, Form::Tall];
}

pub(super) fn form_of(variant: &Variant<AttentionDesc>) -> Form {
    match variant.name {
        name if name.contains(".decode.") => Form::Decode,
        name if name.contains(".short.") => Form::Short,
        _ => Form::Tall,
    }
}

/// Packed rows of a tile.
pub(super) fn tile_q(variant: &Variant<AttentionDesc>) -> u32 {
    match form_of(variant) {
        Form::Decode => 4 * variant.value("ROW_VECS"),
        _ => 4 * variant.value("WORKGROUP") / variant.value("TEAM"),
    }
}

/// Keys of a step.
pub(super) fn tile_k(variant: &Variant<AttentionDesc>) -> u32 {
    match form_of(variant) {
        Form::Decode => variant.value("WORKGROUP") / variant.value("TEAM") * variant.value("KEYS"),
        _ => 4 * variant.value("KEY_VECS") * variant.value("TEAM"),
    }
}

/// What a key costs a tile, in rows of a tall one; rows that a tile has room for cost as much as those that are there.
/// Decoding tiles are low, and a GPU waits for what they read. Measured for 4 rows: lavapipe 2.4, SwiftShader 12.7.
pub(super) fn cost_of(variant: &Variant<AttentionDesc>, caps: &Caps) -> u32 {
    let rows = tile_q(variant);
    match (form_of(variant), caps.info.device_type, caps.subgroup) {
        (Form::Decode, wgpu::DeviceType::Cpu, Some((_, 5..))) => rows / 2,
        (Form::Decode, wgpu::DeviceType::Cpu, _) => 3 * rows,
        (Form::Decode, _, _) => MAX_DECODE_ROWS,
        _ => rows,
    }
}

/// Iterations of nested loops that a step costs, at most.
pub(super) fn step_iterations(desc: &AttentionDesc, variant: &Variant<AttentionDesc>) -> u32 {
    let value = |name| variant.value(name);
    match form_of(variant) {
        Form::Decode => {
            let team = value("TEAM");
            let chunks = desc.head_dim.div_ceil(8 * team) + 2 * desc.v_dim().div_ceil(8 * team).next_power_of_two();
            value("KEYS") * value("ROW_VECS") * (3 * chunks + team + 8) + 64
        }
        _ => {
            let tile = tile_k(variant);
            let dims = desc.head_dim.next_multiple_of(value("DIM_STEP"));
            let stages = dims / value("DIM_STEP") * 4 + tile / value("KEY_STEP") * 4;
            dims * (1 + value("KEY_VECS")) + tile * 9 + stages + 64
        }
    }
}

/// What a kernel does with its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Dest {
    Out,
    Partial,
}

/// How tensors lie, as far as kernels differ by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) q: Width,
    pub(super) k: Width,
    pub(super) v: Width,
    pub(super) out: Width,
    /// Keys lie in pages of so many slots.
    pub(super) page_len: Option<u32>,
}

impl Access {
    pub(super) const fn dense(width: Width) -> Access {
        Access { q: width, k: width, v: width, out: width, page_len: None }
    }
}

pub(super) fn link_of(desc: &AttentionDesc, variant: &Variant<AttentionDesc>, dest: Dest, access: Access) -> Link {
    let decode = form_of(variant) == Form::Decode;
    let mut swaps: Vec<(String, String)> = variant.swaps.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
    let mut values: Vec<(String, u32)> = variant.values.iter().map(|(a, b)| (a.to_string(), *b)).collect();
    let mut swap = |from: &str, to: String| swaps.push((from.into(), to));
    let width = |width: Width| if decode { width } else { width.narrow() };
    swap("q=load_f32", desc.q_dtype.part("load", access.q.narrow()));
    swap("k=load_f32", desc.kv_dtype.part("load", width(access.k)));
    swap("v=load_f32", desc.kv_dtype.part("load", width(access.v)));
    if let Some(page_len) = access.page_len {
        swap("kv_dense", "kv_paged".into());
        values.push(("PAGE_LEN".into(), page_len));
    }
    if let Some(dtype) = desc.bias {
        swap("bias_none", "bias".into());
        swap("bias=load_f32_scalar", dtype.part("load", Width::One));
    }
    match desc.mask {
        Some(MaskKind::Bool) => swap("mask_none", "mask_bool".into()),
        Some(MaskKind::Bits) => swap("mask_none", "mask_bits".into()),
        None => {}
    }
    match dest {
        Dest::Partial => swap("dest_out", "dest_partial".into()),
        Dest::Out => {
            swap("out=store_f32", desc.out_dtype.part("store", access.out.narrow()));
            if desc.lse {
                swap("lse_none", "lse".into());
            }
        }
    }
    let team = variant.value("TEAM");
    if decode {
        let qk_chunks = desc.head_dim.div_ceil(8 * team);
        let v_chunks = desc.v_dim().div_ceil(8 * team).next_power_of_two();
        values.extend([
            ("QK_CHUNKS".into(), qk_chunks),
            ("V_CHUNKS".into(), v_chunks),
            ("QK_FULL".into(), u32::from(8 * team * qk_chunks == desc.head_dim)),
            ("V_FULL".into(), u32::from(8 * team * v_chunks == desc.v_dim())),
        ]);
    } else {
        values.push(("V_VECS".into(), desc.v_dim().div_ceil(4 * team).next_power_of_two()));
    }
    let file = if decode { "attention_decode" } else { "attention" };
    Link { file, swaps, values, subgroups: variant.needs.subgroup_min > 0 }
}

pub(super) fn merge_link(desc: &AttentionDesc, out: Width) -> Link {
    let mut swaps = vec![("out=store_f32".to_string(), desc.out_dtype.part("store", out.narrow()))];
    if desc.lse {
        swaps.push(("lse_none".into(), "lse".into()));
    }
    Link { file: "merge", swaps, values: Vec::new(), subgroups: false }
}

/// Every module that the rows can make, for the tests that compile them for other platforms: each row with each of its
/// widths of V, and each option with one row of each file.
#[doc(hidden)]
pub fn links() -> Vec<(String, Needs, Link)> {
    let mut out = Vec::new();
    let base = AttentionDesc::default();
    for variant in variants() {
        for v_dim in [32, 64, 128, 256, 512] {
            let desc = AttentionDesc { heads: 8, head_dim: v_dim, ..base.clone() };
            let desc = if (variant.suits)(&desc) { desc } else { AttentionDesc { heads: 1, ..desc } };
            if (variant.suits)(&desc) {
                for dest in [Dest::Out, Dest::Partial] {
                    let name = format!("{}.v{v_dim}.{dest:?}", variant.name).to_lowercase();
                    out.push((name, variant.needs, link_of(&desc, &variant, dest, Access::dense(Width::Four))));
                }
            }
        }
    }
    for form in [Form::Decode, Form::Tall] {
        let mut rows = variants().into_iter().filter(|row| row.is_portable() && form_of(row) == form);
        let variant = rows.next_back().expect("each form has a portable row");
        for dtype in DType::ALL {
            for width in Width::ALL {
                for mask in [None, Some(MaskKind::Bool), Some(MaskKind::Bits)] {
                    for page_len in [None, Some(3)] {
                        let bias = (mask != Some(MaskKind::Bits)).then_some(dtype);
                        let desc = AttentionDesc {
                            q_dtype: dtype,
                            kv_dtype: dtype,
                            out_dtype: dtype,
                            lse: true,
                            mask,
                            bias,
                            ..base.clone()
                        };
                        let access = Access { page_len, ..Access::dense(width) };
                        let options = match mask {
                            None => "bias",
                            Some(MaskKind::Bool) => "bias-bool",
                            Some(MaskKind::Bits) => "bits",
                        };
                        let kv = if page_len.is_some() { "paged" } else { "dense" };
                        let name = format!("{}.{dtype}.{}.{options}.{kv}", variant.name, width.name());
                        out.push((name, variant.needs, link_of(&desc, &variant, Dest::Out, access)));
                        if mask.is_none() && page_len.is_none() && form == Form::Tall {
                            let name = format!("attention.merge.{dtype}.{}", width.name());
                            out.push((name, Needs::NONE, merge_link(&desc, width)));
                        }
                    }
                }
            }
        }
    }
    out
}
