//! The variant rows of attention, and what each is linked from.

use crate::caps::Needs;
use crate::kernel::Variant;
use crate::ops::attention::{AttentionDesc, MaskKind};
use crate::shader::Link;
use crate::view::DType;

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

/// The rows, best first within each form; `short` serves up to 16 packed rows, `tall` more.
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
    ]
}

pub(super) fn is_short(variant: &Variant<AttentionDesc>) -> bool {
    variant.name.contains(".short.")
}

/// Packed rows of a tile.
pub(super) fn tile_q(variant: &Variant<AttentionDesc>) -> u32 {
    4 * variant.value("WORKGROUP") / variant.value("TEAM")
}

/// Keys of a step.
pub(super) fn tile_k(variant: &Variant<AttentionDesc>) -> u32 {
    4 * variant.value("KEY_VECS") * variant.value("TEAM")
}

/// What a kernel does with its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Dest {
    Out,
    Partial,
}

/// Which tensors can be read and written four elements at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByFours {
    pub(super) q: bool,
    pub(super) k: bool,
    pub(super) v: bool,
    pub(super) out: bool,
}

impl ByFours {
    pub(super) const ALL: ByFours = ByFours { q: true, k: true, v: true, out: true };
}

pub(super) fn link_of(desc: &AttentionDesc, variant: &Variant<AttentionDesc>, dest: Dest, by_fours: ByFours) -> Link {
    let mut swaps: Vec<(String, String)> = variant.swaps.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
    let mut swap = |from: &str, to: String| swaps.push((from.into(), to));
    swap("q=load_f32", desc.q_dtype.part("load", by_fours.q));
    swap("k=load_f32", desc.kv_dtype.part("load", by_fours.k));
    swap("v=load_f32", desc.kv_dtype.part("load", by_fours.v));
    if let Some(dtype) = desc.bias {
        swap("bias_none", "bias".into());
        swap("bias=load_f32_scalar", dtype.part("load", false));
    }
    match desc.mask {
        Some(MaskKind::Bool) => swap("mask_none", "mask_bool".into()),
        Some(MaskKind::Bits) => swap("mask_none", "mask_bits".into()),
        None => {}
    }
    match dest {
        Dest::Partial => swap("dest_out", "dest_partial".into()),
        Dest::Out => {
            swap("out=store_f32", desc.out_dtype.part("store", by_fours.out));
            if desc.lse {
                swap("lse_none", "lse".into());
            }
        }
    }
    let mut values: Vec<(String, u32)> = variant.values.iter().map(|(a, b)| (a.to_string(), *b)).collect();
    values.push(("V_VECS".into(), desc.v_dim().div_ceil(4 * variant.value("TEAM")).next_power_of_two()));
    Link { file: "attention", swaps, values, subgroups: variant.needs.subgroup_min > 0 }
}

pub(super) fn merge_link(desc: &AttentionDesc, by_fours: ByFours) -> Link {
    let mut swaps = vec![("out=store_f32".to_string(), desc.out_dtype.part("store", by_fours.out))];
    if desc.lse {
        swaps.push(("lse_none".into(), "lse".into()));
    }
    Link { file: "merge", swaps, values: Vec::new(), subgroups: false }
}

/// Every module that the rows can make, for the tests that compile them for other platforms: each row with each of its
/// widths of V, and each option with one row.
#[doc(hidden)]
pub fn links() -> Vec<(String, Needs, Link)> {
    let mut out = Vec::new();
    let base = AttentionDesc::default();
    for variant in variants() {
        for v_dim in [32, 64, 128, 256, 512] {
            let desc = AttentionDesc { v_head_dim: Some(v_dim), ..base.clone() };
            if (variant.suits)(&desc) {
                for dest in [Dest::Out, Dest::Partial] {
                    let name = format!("{}.v{v_dim}.{dest:?}", variant.name).to_lowercase();
                    out.push((name, variant.needs, link_of(&desc, &variant, dest, ByFours::ALL)));
                }
            }
        }
    }
    let portable = variants().into_iter().rfind(Variant::is_portable).into_iter();
    for variant in portable {
        for dtype in DType::ALL {
            for aligned in [true, false] {
                for mask in [None, Some(MaskKind::Bool), Some(MaskKind::Bits)] {
                    let by_fours = ByFours { q: aligned, k: aligned, v: aligned, out: aligned };
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
                    let fours = if aligned { "fours" } else { "scalar" };
                    let options = match mask {
                        None => "bias",
                        Some(MaskKind::Bool) => "bias-bool",
                        Some(MaskKind::Bits) => "bits",
                    };
                    let name = format!("{}.{dtype}.{fours}.{options}", variant.name);
                    out.push((name, variant.needs, link_of(&desc, &variant, Dest::Out, by_fours)));
                    if mask.is_none() {
                        let name = format!("attention.merge.{dtype}.{fours}");
                        out.push((name, Needs::NONE, merge_link(&desc, by_fours)));
                    }
                }
            }
        }
    }
    out
}
