//! A planned batch on the device: its lists, its workspace, its dispatches.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernel::{Pipeline, Variant};
use crate::ops::attention::batch::{Batch, Lengths};
use crate::ops::attention::plan::{
    Bounds, Height, Item, Kernel, MergeItem, Plan, PlannedItem, plan, slot_bytes, token_stride,
};
use crate::ops::attention::rows::{
    Access, Form, cost_of, form_of, link_of, merge_link, step_iterations, tile_k, tile_q,
};
use crate::ops::attention::{Attention, AttentionDesc, MaskKind, Params};
use crate::ops::retired::{room_for, serves};
use crate::runtime::Runtime;
use crate::shader::shader_struct;
use crate::view::{DType, Layout, ScoreLayout, check_strides};

shader_struct! {
    struct Strides {
        q_seq: u32,
        q_head: u32,
        k_page: u32,
        k_seq: u32,
        k_head: u32,
        v_page: u32,
        v_seq: u32,
        v_head: u32,
        out_seq: u32,
        out_head: u32,
        lse_head: u32,
        bias_key: u32,
        mask_key: u32,
        kv_heads: u32,
    }
}

/// Which WGSL file has which of these structs, for the test that compares them.
#[doc(hidden)]
pub const STRUCTS: &[(&str, &str, &[&str])] = &[
    ("parts/params", "Params", Params::FIELDS),
    ("parts/strides", "Strides", Strides::FIELDS),
    ("parts/plan", "Item", Item::FIELDS),
    ("parts/states_partial", "MergeItem", MergeItem::FIELDS),
];

/// One workgroup of a GPU without matrix units does some 2³⁴ multiply-adds a second.
const ITEM_KEYS: u32 = 1 << 16;
/// 0.1 s on a GPU of 2.5 TFLOP/s; the H200 needs 15 ms, against which a dispatch more is nothing.
const DISPATCH_WORK: u64 = 1 << 37;
/// Beyond this, split work is done in rounds that share the workspace.
const WORKSPACE: u64 = 128 << 20;

/// One dispatch.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) plan: std::ops::Range<u64>, // bytes in the plan's buffer
    pub(super) grid: [u32; 3],
}

/// Bytes that a schedule reaches in each buffer of the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reach {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) out: u64,
    pub(crate) lse: u64,
    pub(crate) bias: u64,
    pub(crate) mask: u64,
}

/// What a schedule holds on the device. Commands that use it hold a clone of `in_use` until the device is done with them.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(super) plan: wgpu::Buffer,
    pub(super) strides: wgpu::Buffer,
    pub(super) partials: Option<wgpu::Buffer>,
    pub(super) in_use: Arc<()>,
}

/// The work of a batch, balanced over workgroups, with its lists on the device. Immutable: it can be recorded any number
/// of times, into any encoders, with other buffers each time. Once dropped, and once the device is done with all commands
/// that use it, its buffers serve later schedules.
#[derive(Debug)]
pub struct Schedule {
    pub(super) runtime: Runtime,
    pub(super) made_for: AttentionDesc,
    pub(super) steps: Vec<Step>,
    pub(super) buffers: Option<Buffers>, // none if there is nothing to do
    pub(super) reach: Reach,
    workspace: u64,
    splits: usize,
    pub(super) cascades: bool,
    variants: Vec<&'static str>,
}

impl Schedule {
    /// Names of the rows it uses, of those that [`Attention::variants`] names.
    pub fn variants(&self) -> &[&'static str] {
        &self.variants
    }

    /// Dispatches that recording appends.
    pub fn dispatches(&self) -> usize {
        self.steps.len()
    }

    /// Tiles of rows whose keys are split over workgroups and merged.
    pub fn split_tiles(&self) -> usize {
        self.splits
    }

    /// Bytes of partial states it holds on the device.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace
    }
}

impl Drop for Schedule {
    fn drop(&mut self) {
        if let Some(buffers) = self.buffers.take() {
            self.runtime.retired_schedules().put(buffers);
        }
    }
}

impl Attention {
    /// Plans a batch: cuts it into items, splits keys over workgroups where rows are few, and writes the lists to the
    /// device. No command is recorded; a batch without rows gives a schedule without dispatches.
    pub fn schedule(&self, batch: &Batch) -> Result<Schedule> {
        let desc = &self.desc;
        let reach = self.reach(batch)?;
        let plan = self.plan(batch)?;
        let access = Access {
            q: batch.q_layout.width(desc.head_dim),
            k: batch.k_layout.width(desc.head_dim),
            v: batch.v_layout.width(desc.v_dim()),
            out: batch.out_layout.width(desc.v_dim()),
            page_len: batch.pages.map(|pages| pages.page_len),
        };
        let mut steps = Vec::with_capacity(plan.dispatches.len());
        let mut variants = Vec::new();
        for planned in &plan.dispatches {
            let pipeline = match planned.kernel {
                Kernel::Merge => self.runtime.pipeline("attention.merge", &merge_link(desc, access.out))?,
                Kernel::Attend { form, dest } => {
                    let row = self.row(form);
                    if !variants.contains(&row.name) {
                        variants.push(row.name);
                    }
                    self.runtime.pipeline(row.name, &link_of(desc, row, dest, access))?
                }
            };
            let plan = 4 * planned.words.start as u64..4 * planned.words.end as u64;
            steps.push(Step { pipeline, plan, grid: planned.grid });
        }
        let workspace = plan.slots * u64::from(desc.kv_heads) * slot_bytes(desc.v_dim());
        Ok(Schedule {
            runtime: self.runtime.clone(),
            made_for: desc.clone(),
            buffers: if steps.is_empty() { None } else { Some(self.buffers(batch, &plan, workspace)?) },
            steps,
            reach,
            workspace,
            splits: plan.splits,
            cascades: plan.cascades,
            variants,
        })
    }

    /// The lists on the device: two writes into buffers of an earlier schedule, or into new ones.
    fn buffers(&self, batch: &Batch, plan: &Plan, workspace: u64) -> Result<Buffers> {
        let desc = &self.desc;
        let strides = Strides {
            q_seq: token_stride(batch).unwrap_or(batch.q_layout.seq) as u32,
            q_head: batch.q_layout.head as u32,
            k_page: batch.k_layout.batch as u32,
            k_seq: batch.k_layout.seq as u32,
            k_head: batch.k_layout.head as u32,
            v_page: batch.v_layout.batch as u32,
            v_seq: batch.v_layout.seq as u32,
            v_head: batch.v_layout.head as u32,
            out_seq: batch.out_layout.seq as u32,
            out_head: batch.out_layout.head as u32,
            lse_head: batch.q.lse_rows() as u32,
            bias_key: batch.bias_of(desc, 0).key as u32,
            mask_key: batch.mask_of(desc, 0).key as u32,
            kv_heads: desc.kv_heads,
        };
        let runtime = &self.runtime;
        let (usage, copy) = (wgpu::BufferUsages::STORAGE, wgpu::BufferUsages::COPY_DST);
        let bytes: &[u8] = bytemuck::cast_slice(&plan.words);
        let needed = bytes.len() as u64;
        let fits = |buffers: &Buffers| {
            let (have, have_partials) = (buffers.plan.size(), buffers.partials.as_ref().map_or(0, wgpu::Buffer::size));
            serves(have, needed) && serves(have_partials, workspace) && Arc::strong_count(&buffers.in_use) == 1
        };
        let buffers = match runtime.retired_schedules().take(fits) {
            Some(buffers) => buffers,
            None => {
                let room = room_for(needed, &runtime.caps().limits);
                Buffers {
                    plan: runtime.buffer("attention plan", room, usage | copy)?,
                    strides: runtime.buffer(
                        "attention strides",
                        size_of::<Strides>() as u64,
                        wgpu::BufferUsages::UNIFORM | copy,
                    )?,
                    partials: (workspace > 0)
                        .then(|| runtime.buffer("attention partials", workspace, usage))
                        .transpose()?,
                    in_use: Arc::default(),
                }
            }
        };
        runtime.queue().write_buffer(&buffers.plan, 0, bytes);
        runtime.queue().write_buffer(&buffers.strides, 0, bytemuck::bytes_of(&strides));
        Ok(buffers)
    }

    /// The items that a schedule of this batch has, without making one.
    #[doc(hidden)]
    pub fn planned_items(&self, batch: &Batch) -> Result<Vec<PlannedItem>> {
        batch.validate()?;
        Ok(self.plan(batch)?.items())
    }

    fn plan(&self, batch: &Batch) -> Result<Plan> {
        plan(&self.desc, batch, self.bounds())
    }

    fn row(&self, form: Form) -> &Variant<AttentionDesc> {
        let row = self.rows.iter().find(|row| form_of(row) == form);
        row.expect("plans use only forms that `bounds` names")
    }

    fn bounds(&self) -> Bounds {
        let caps = self.runtime.caps();
        let height = |row: &Variant<AttentionDesc>| {
            let step = tile_k(row);
            let keys = match caps.loop_limit {
                None => ITEM_KEYS,
                Some(limit) => ((limit / step_iterations(&self.desc, row)).max(1) * step).min(ITEM_KEYS),
            };
            Height { rows: tile_q(row), cost: cost_of(row, caps), step, keys }
        };
        let limits = &caps.limits;
        Bounds {
            heights: Form::ALL.map(|form| self.rows.iter().find(|row| form_of(row) == form).map(height)),
            workgroups: u64::from(2 * caps.resident_workgroups()),
            workspace: WORKSPACE.min(limits.max_storage_buffer_binding_size),
            dispatch: (limits.max_compute_workgroups_per_dimension as usize)
                .min(limits.max_storage_buffer_binding_size as usize / size_of::<Item>()),
            binding: limits.max_storage_buffer_binding_size,
            alignment: limits.min_storage_buffer_offset_alignment,
            states: caps.loop_limit.map_or(u32::MAX, |limit| limit / 5), // the merge goes over them in up to four loops
            work: DISPATCH_WORK,
        }
    }

    /// Bytes that the batch reaches in each tensor, after all checks: of the batch itself, of offsets and sizes against what
    /// u32 and a binding can carry.
    pub(crate) fn reach(&self, batch: &Batch) -> Result<Reach> {
        batch.validate()?;
        let desc = &self.desc;
        for (what, wanted, layout) in
            [("bias", desc.bias.is_some(), batch.bias_layout), ("mask", desc.mask.is_some(), batch.mask_layout)]
        {
            if wanted && layout.is_none() && !(what == "mask" && batch.mask_offsets.is_some()) {
                return Err(Error::shape(format!("{what}_layout"), format!("one, since there is a {what}"), "none"));
            }
        }
        let bit_key = batch.mask_layout.map_or(0, |layout| layout.key);
        if desc.mask == Some(MaskKind::Bits) && bit_key > 1 {
            return Err(Error::shape("mask_layout.key", "0 or 1 for a bit mask", bit_key));
        }
        let limit = self.runtime.caps().limits.max_storage_buffer_binding_size;
        let bytes = |what: &str, elements: u64, numerator: u64| -> Result<u64> {
            let given = elements.saturating_mul(numerator);
            if elements > u64::from(u32::MAX) {
                let hint = "offsets must fit in 32 bits; split the batch";
                return Err(Error::limit(format!("elements of {what}"), u32::MAX.into(), elements, hint));
            }
            if given > limit {
                let hint = "the device binds no more; split the batch, or request the device with the adapter's limits";
                return Err(Error::limit(format!("bytes of {what}"), limit, given, hint));
            }
            Ok(given)
        };
        let rows = |what: &str, lengths: &Lengths, layout: &Layout, heads: u32, dim: u32, dtype: DType| {
            let last = (0..lengths.batch())
                .filter(|b| lengths.len(*b) > 0)
                .map(|b| {
                    let seq = u64::from(lengths.len(b) - 1).saturating_mul(layout.seq);
                    lengths.start(b, layout).saturating_add(seq)
                })
                .max();
            let heads = u64::from(heads - 1).saturating_mul(layout.head);
            let elements = last.map_or(0, |last| last.saturating_add(heads).saturating_add(dim.into()));
            bytes(what, elements, dtype.size())
        };
        let scores = |what: &str, of: &dyn Fn(usize) -> ScoreLayout, size: u64, keys: fn(u32) -> u32| {
            let end = (0..batch.q.batch())
                .filter(|b| batch.q.len(*b) > 0 && batch.kv.len(*b) > 0)
                .map(|b| {
                    let layout = of(b);
                    let key = u64::from(keys(batch.kv.len(b)) - 1).saturating_mul(layout.key);
                    let row = u64::from(batch.q.len(b) - 1).saturating_mul(layout.row);
                    let head = u64::from(desc.heads - 1).saturating_mul(layout.head);
                    [key, row, head, 1].into_iter().fold(layout.offset, u64::saturating_add)
                })
                .max();
            bytes(what, end.unwrap_or(0), size)
        };
        // The farthest page with a key that some row sees; ids of other pages are not looked at.
        let pool = |what: &str, layout: &Layout, dim: u32| {
            let Some(pages) = &batch.pages else {
                return rows(what, &batch.kv, layout, desc.kv_heads, dim, desc.kv_dtype);
            };
            let mut last = None;
            for b in 0..batch.kv.batch() {
                let seen = batch.visible_to_any(desc, b);
                if seen.is_empty() {
                    continue;
                }
                let (first, end) = (seen.start / pages.page_len, seen.end.div_ceil(pages.page_len));
                last = last.max(pages.of(b)[first as usize..end as usize].iter().copied().max());
            }
            let longest = (0..batch.kv.batch()).map(|b| batch.kv.len(b)).max().unwrap_or(0);
            let slots = u64::from(pages.page_len.min(longest.max(1)) - 1);
            let elements = last.map_or(0, |page| {
                let in_page = slots.saturating_mul(layout.seq);
                let heads = u64::from(desc.kv_heads - 1).saturating_mul(layout.head);
                [u64::from(page).saturating_mul(layout.batch), in_page, heads, dim.into()]
                    .into_iter()
                    .fold(layout.offset, u64::saturating_add)
            });
            bytes(what, elements, desc.kv_dtype.size())
        };
        let (dim, v_dim) = (desc.head_dim, desc.v_dim());
        check_distinct(batch, desc)?;
        let mask_of = |b: usize| batch.mask_of(desc, b);
        Ok(Reach {
            q: rows("q", &batch.q, &batch.q_layout, desc.heads, dim, desc.q_dtype)?,
            k: pool("k", &batch.k_layout, dim)?,
            v: pool("v", &batch.v_layout, v_dim)?,
            out: rows("out", &batch.q, &batch.out_layout, desc.heads, v_dim, desc.out_dtype)?,
            lse: if desc.lse { bytes("lse", batch.q.lse_len(desc.heads), 4)? } else { 0 },
            bias: desc
                .bias
                .map_or(Ok(0), |dtype| scores("bias", &|b| batch.bias_of(desc, b), dtype.size(), |keys| keys))?,
            mask: match desc.mask {
                Some(MaskKind::Bool) => scores("mask", &mask_of, 1, |keys| keys)?,
                Some(MaskKind::Bits) => scores("mask", &mask_of, 4, |keys| keys.div_ceil(32))?,
                None => 0,
            },
        })
    }
}

/// No two elements of O may lie at one place: two workgroups would race for it.
fn check_distinct(batch: &Batch, desc: &AttentionDesc) -> Result<()> {
    let layout = &batch.out_layout;
    let longest = (0..batch.q.batch()).map(|b| batch.q.len(b)).max().unwrap_or(0);
    let mut dims = vec![(layout.head, u64::from(desc.heads))];
    match batch.q {
        Lengths::Ragged { .. } => dims.push((layout.seq, batch.q.lse_rows())),
        _ => dims.extend([(layout.seq, u64::from(longest)), (layout.batch, batch.q.batch() as u64)]),
    }
    check_strides("out_layout", &mut dims, desc.v_dim().into())
}
