//! The work of a batch, cut into items and balanced over workgroups.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernel::{Pipeline, Variant};
use crate::ops::attention::batch::{Batch, Lengths};
use crate::ops::attention::rows::{ByFours, Dest, link_of, merge_link, tile_k, tile_q};
use crate::ops::attention::{Attention, AttentionDesc, MaskKind, Params};
use crate::runtime::Runtime;
use crate::shader::shader_struct;
use crate::view::{DType, Layout, ScoreLayout, check_strides};

shader_struct! {
    struct Strides {
        q_seq: u32,
        q_head: u32,
        k_seq: u32,
        k_head: u32,
        v_seq: u32,
        v_head: u32,
        out_seq: u32,
        out_head: u32,
        lse_head: u32,
        bias_head: u32,
        bias_row: u32,
        bias_key: u32,
        mask_head: u32,
        mask_row: u32,
        mask_key: u32,
        kv_heads: u32,
    }
}

shader_struct! {
    struct Item {
        q: u32,
        k: u32,
        v: u32,
        out: u32,
        lse: u32,
        bias: u32,
        mask: u32,
        row_begin: u32,
        row_count: u32,
        kv_begin: u32,
        kv_end: u32,
        q_pos: i32,
        slot: u32,
        pad_a: u32,
        pad_b: u32,
        pad_c: u32,
    }
}

shader_struct! {
    struct MergeItem {
        out: u32,
        lse: u32,
        row_begin: u32,
        row_count: u32,
        slot: u32,
        states: u32,
        pad_a: u32,
        pad_b: u32,
    }
}

/// Which WGSL file has which of these structs, for the test that compares them.
#[doc(hidden)]
pub const STRUCTS: &[(&str, &str, &[&str])] = &[
    ("parts/params", "Params", Params::FIELDS),
    ("parts/strides", "Strides", Strides::FIELDS),
    ("attention", "Item", Item::FIELDS),
    ("parts/states_partial", "MergeItem", MergeItem::FIELDS),
];

/// Elements of workspace and dispatch sizes that a schedule may use.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Keys of one item, from the adapter's loop limit and so that no workgroup runs for long.
    keys: u32,
    /// Workgroups to fill the device.
    workgroups: u64,
    /// Bytes of partial states at a time.
    workspace: u64,
    /// Items of a dispatch: workgroups in one dimension, and what can be bound.
    dispatch: usize,
    /// States of a merge, from the adapter's loop limit.
    states: u32,
    /// Multiply-adds of a dispatch, so that none runs into a watchdog.
    work: u64,
}

/// One workgroup of a GPU without matrix units does some 2³⁴ multiply-adds a second.
const ITEM_KEYS: u32 = 1 << 16;
/// 0.1 s on a GPU of 2.5 TFLOP/s; the H200 needs 15 ms, against which a dispatch more is nothing.
const DISPATCH_WORK: u64 = 1 << 37;
/// Beyond this, split work is done in rounds that share the workspace.
const WORKSPACE: u64 = 128 << 20;
/// A chunk of keys shorter than this is not worth a partial state.
const MIN_CHUNK: u32 = 128;

/// A tile of rows before keys are split.
#[derive(Clone, Copy, Debug)]
struct Tile {
    item: Item,
    short: bool,
}

impl Tile {
    fn keys(&self) -> u32 {
        self.item.kv_end - self.item.kv_begin
    }
}

/// One dispatch.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) items: std::ops::Range<u64>, // bytes in the items buffer
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

/// The work of a batch, balanced over workgroups, with its lists on the device. Immutable: it can be recorded any number
/// of times, into any encoders, with other buffers each time, and lives as long as the commands that use it need it.
#[derive(Debug)]
pub struct Schedule {
    pub(super) runtime: Runtime,
    pub(super) made_for: AttentionDesc,
    pub(super) steps: Vec<Step>,
    pub(super) items: Option<wgpu::Buffer>,
    pub(super) partials: Option<wgpu::Buffer>,
    pub(super) strides: wgpu::Buffer,
    pub(super) reach: Reach,
    workspace: u64,
    splits: usize,
}

impl Schedule {
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

/// An item as planned, for tests of the coverage: packed rows of a sequence against keys.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlannedItem {
    pub dispatch: usize,
    pub q: u32,
    pub row_begin: u32,
    pub row_count: u32,
    pub kv_begin: u32,
    pub kv_end: u32,
}

/// The lists of a schedule before they go to the device.
#[derive(Debug, Default)]
struct Lists {
    bytes: Vec<u8>,
    planned: Vec<Planned>,
    slots: u64, // most at a time
    splits: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kernel {
    Attend { short: bool, dest: Dest },
    Merge,
}

#[derive(Clone, Debug)]
struct Planned {
    kernel: Kernel,
    items: std::ops::Range<u64>,
    grid: [u32; 3],
}

impl Attention {
    /// Plans a batch: cuts it into items, splits keys over workgroups where rows are few, and writes the lists to the
    /// device. No command is recorded; a batch without rows gives a schedule without dispatches.
    pub fn schedule(&self, batch: &Batch) -> Result<Schedule> {
        let desc = &self.desc;
        let reach = self.reach(batch)?;
        let lists = self.plan(batch)?;
        let by_fours = ByFours {
            q: batch.q_layout.by_fours(desc.head_dim),
            k: batch.k_layout.by_fours(desc.head_dim),
            v: batch.v_layout.by_fours(desc.v_dim()),
            out: batch.out_layout.by_fours(desc.v_dim()),
        };
        let (bias_layout, mask_layout) = score_layouts(desc, batch);
        let strides = Strides {
            q_seq: batch.q_layout.seq as u32,
            q_head: batch.q_layout.head as u32,
            k_seq: batch.k_layout.seq as u32,
            k_head: batch.k_layout.head as u32,
            v_seq: batch.v_layout.seq as u32,
            v_head: batch.v_layout.head as u32,
            out_seq: batch.out_layout.seq as u32,
            out_head: batch.out_layout.head as u32,
            lse_head: batch.q.lse_rows() as u32,
            bias_head: bias_layout.head as u32,
            bias_row: bias_layout.row as u32,
            bias_key: bias_layout.key as u32,
            mask_head: mask_layout.head as u32,
            mask_row: mask_layout.row as u32,
            mask_key: mask_layout.key as u32,
            kv_heads: desc.kv_heads,
        };
        let mut steps = Vec::with_capacity(lists.planned.len());
        for planned in &lists.planned {
            let pipeline = match planned.kernel {
                Kernel::Merge => self.runtime.pipeline("attention.merge", &merge_link(desc, by_fours))?,
                Kernel::Attend { short, dest } => {
                    let row = self.row(short);
                    self.runtime.pipeline(row.name, &link_of(desc, row, dest, by_fours))?
                }
            };
            steps.push(Step { pipeline, items: planned.items.clone(), grid: planned.grid });
        }
        let workspace = lists.slots * u64::from(desc.kv_heads) * slot_bytes(desc.v_dim());
        let storage = wgpu::BufferUsages::STORAGE;
        Ok(Schedule {
            runtime: self.runtime.clone(),
            made_for: desc.clone(),
            items: (!lists.bytes.is_empty())
                .then(|| self.runtime.upload("attention items", &lists.bytes, storage))
                .transpose()?,
            partials: (workspace > 0)
                .then(|| self.runtime.buffer("attention partials", workspace, storage))
                .transpose()?,
            strides: self.runtime.upload(
                "attention strides",
                bytemuck::bytes_of(&strides),
                wgpu::BufferUsages::UNIFORM,
            )?,
            steps,
            reach,
            workspace,
            splits: lists.splits,
        })
    }

    /// The items that a schedule of this batch has, without making one.
    #[doc(hidden)]
    pub fn planned_items(&self, batch: &Batch) -> Result<Vec<PlannedItem>> {
        batch.validate()?;
        let lists = self.plan(batch)?;
        let mut out = Vec::new();
        for (dispatch, planned) in lists.planned.iter().enumerate() {
            if planned.kernel == Kernel::Merge {
                continue;
            }
            let bytes = &lists.bytes[planned.items.start as usize..planned.items.end as usize];
            out.extend(bytemuck::pod_collect_to_vec::<u8, Item>(bytes).into_iter().map(|item| PlannedItem {
                dispatch,
                q: item.q,
                row_begin: item.row_begin,
                row_count: item.row_count,
                kv_begin: item.kv_begin,
                kv_end: item.kv_end,
            }));
        }
        Ok(out)
    }

    fn row(&self, short: bool) -> &Variant<AttentionDesc> {
        let (first, second) = if short { (&self.short, &self.tall) } else { (&self.tall, &self.short) };
        first.as_ref().or(second.as_ref()).expect("`with_rows` demands one")
    }

    fn bounds(&self) -> Bounds {
        let caps = self.runtime.caps();
        // A step of keys costs about this many iterations of nested loops at most.
        let steps = |row: &Variant<AttentionDesc>| {
            let tile = tile_k(row);
            let dims = self.desc.head_dim.next_multiple_of(row.value("DIM_STEP"));
            let stages = dims / row.value("DIM_STEP") * 4 + tile / row.value("KEY_STEP") * 4;
            (dims * (1 + row.value("KEY_VECS")) + tile * 9 + stages + 64, tile)
        };
        let keys = match caps.loop_limit {
            None => ITEM_KEYS,
            Some(limit) => {
                let most = |row: &Variant<AttentionDesc>| (limit / steps(row).0).max(1) * steps(row).1;
                most(self.row(true)).min(most(self.row(false))).min(ITEM_KEYS)
            }
        };
        let limits = &caps.limits;
        Bounds {
            keys,
            workgroups: u64::from(2 * caps.resident_workgroups()),
            workspace: WORKSPACE.min(limits.max_storage_buffer_binding_size),
            dispatch: (limits.max_compute_workgroups_per_dimension as usize)
                .min(limits.max_storage_buffer_binding_size as usize / size_of::<Item>()),
            states: caps.loop_limit.map_or(u32::MAX, |limit| limit / 5), // the merge goes over them in up to four loops
            work: DISPATCH_WORK,
        }
    }

    /// Cuts a batch into tiles of rows with the range of keys that any of them sees.
    fn tiles(&self, batch: &Batch) -> Vec<Tile> {
        let desc = &self.desc;
        let group = desc.group();
        let (bias_layout, mask_layout) = score_layouts(desc, batch);
        let (short_rows, tall_rows) = (tile_q(self.row(true)), tile_q(self.row(false)));
        let mut tiles = Vec::new();
        if batch.q.lse_rows() == 0 {
            return tiles; // however many sequences
        }
        for b in 0..batch.q.batch() {
            let rows = u64::from(batch.q.len(b)) * u64::from(group);
            let item = Item {
                q: batch.q.start(b, &batch.q_layout) as u32,
                k: batch.kv.start(b, &batch.k_layout) as u32,
                v: batch.kv.start(b, &batch.v_layout) as u32,
                out: batch.q.start(b, &batch.out_layout) as u32,
                lse: batch.q.lse_place(b, desc.heads).0 as u32,
                bias: (bias_layout.offset + b as u64 * bias_layout.batch) as u32,
                mask: (mask_layout.offset + b as u64 * mask_layout.batch) as u32,
                q_pos: batch.start_of(b) as i32,
                ..Item::default()
            };
            let mut row = 0;
            while row < rows {
                let short = self.tall.is_none() || (self.short.is_some() && rows - row <= u64::from(short_rows));
                let count = (rows - row).min(u64::from(if short { short_rows } else { tall_rows }));
                let (first, last) = (row / u64::from(group), (row + count - 1) / u64::from(group));
                // Ranges of later rows start and end later, so the tile's reaches from the first's start to the last's end.
                let low = batch.visible(desc, b, first as u32).start;
                let high = batch.visible(desc, b, last as u32).end;
                let (kv_begin, kv_end) = if low < high { (low, high) } else { (0, 0) };
                let item = Item { row_begin: row as u32, row_count: count as u32, kv_begin, kv_end, ..item };
                tiles.push(Tile { item, short });
                row += count;
            }
        }
        tiles
    }

    /// Keys of one item: all of a tile's if the tiles fill the device, otherwise the smallest multiple of the key step
    /// with which the items number at most `bounds.workgroups`.
    fn chunk(&self, tiles: &[Tile], bounds: &Bounds) -> u32 {
        let heads = u64::from(self.desc.kv_heads);
        let step = tile_k(self.row(true)).max(tile_k(self.row(false)));
        let most = (bounds.keys / step).max(1); // in steps
        let items = |steps: u32| -> u64 {
            tiles.iter().map(|tile| u64::from(tile.keys().div_ceil(steps * step).max(1))).sum::<u64>() * heads
        };
        if tiles.len() as u64 * heads >= bounds.workgroups / 2 {
            return most * step;
        }
        let (mut low, mut high) = (MIN_CHUNK.div_ceil(step).min(most), most);
        while low < high {
            let middle = low + (high - low) / 2;
            if items(middle) <= bounds.workgroups { high = middle } else { low = middle + 1 }
        }
        low * step
    }

    fn plan(&self, batch: &Batch) -> Result<Lists> {
        let bounds = self.bounds();
        let desc = &self.desc;
        let tiles = self.tiles(batch);
        let chunk = self.chunk(&tiles, &bounds);
        let alignment = self.runtime.caps().limits.min_storage_buffer_offset_alignment;
        let mut writer = Writer { lists: Lists::default(), desc, bounds, alignment: alignment.into() };

        let (mut whole, split): (Vec<Tile>, Vec<Tile>) = tiles.into_iter().partition(|tile| tile.keys() <= chunk);
        whole.sort_by_key(|tile| std::cmp::Reverse(tile.keys())); // longest first, so that the end is even
        for short in [false, true] {
            let items: Vec<Item> = whole.iter().filter(|tile| tile.short == short).map(|tile| tile.item).collect();
            writer.attend(short, Dest::Out, &items);
        }
        writer.lists.splits = split.len();
        let mut rest = split.as_slice();
        while !rest.is_empty() {
            rest = writer.round(rest, chunk)?;
        }
        Ok(writer.lists)
    }

    /// Bytes that the batch reaches in each tensor, after all checks: of the batch itself, of offsets and sizes against what
    /// u32 and a binding can carry.
    pub(crate) fn reach(&self, batch: &Batch) -> Result<Reach> {
        batch.validate()?;
        let desc = &self.desc;
        for (what, wanted, layout) in
            [("bias", desc.bias.is_some(), batch.bias_layout), ("mask", desc.mask.is_some(), batch.mask_layout)]
        {
            if wanted && layout.is_none() {
                return Err(Error::shape(format!("{what}_layout"), format!("one, since there is a {what}"), "none"));
            }
        }
        let (bias_layout, mask_layout) = score_layouts(desc, batch);
        if desc.mask == Some(MaskKind::Bits) && mask_layout.key > 1 {
            return Err(Error::shape("mask_layout.key", "0 or 1 for a bit mask", mask_layout.key));
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
        let scores = |what: &str, layout: &ScoreLayout, size: u64, keys: fn(u32) -> u32| {
            let last = (0..batch.q.batch())
                .filter(|b| batch.q.len(*b) > 0 && batch.kv.len(*b) > 0)
                .map(|b| {
                    let key = u64::from(keys(batch.kv.len(b)) - 1).saturating_mul(layout.key);
                    let row = u64::from(batch.q.len(b) - 1).saturating_mul(layout.row);
                    let batch = (b as u64).saturating_mul(layout.batch);
                    layout.offset.saturating_add(batch).saturating_add(row).saturating_add(key)
                })
                .max();
            let heads = u64::from(desc.heads - 1).saturating_mul(layout.head);
            bytes(what, last.map_or(0, |last| last.saturating_add(heads).saturating_add(1)), size)
        };
        let (dim, v_dim) = (desc.head_dim, desc.v_dim());
        check_distinct(batch, desc)?;
        Ok(Reach {
            q: rows("q", &batch.q, &batch.q_layout, desc.heads, dim, desc.q_dtype)?,
            k: rows("k", &batch.kv, &batch.k_layout, desc.kv_heads, dim, desc.kv_dtype)?,
            v: rows("v", &batch.kv, &batch.v_layout, desc.kv_heads, v_dim, desc.kv_dtype)?,
            out: rows("out", &batch.q, &batch.out_layout, desc.heads, v_dim, desc.out_dtype)?,
            lse: if desc.lse { bytes("lse", batch.q.lse_len(desc.heads), 4)? } else { 0 },
            bias: desc.bias.map_or(Ok(0), |dtype| scores("bias", &bias_layout, dtype.size(), |keys| keys))?,
            mask: match desc.mask {
                Some(MaskKind::Bool) => scores("mask", &mask_layout, 1, |keys| keys)?,
                Some(MaskKind::Bits) => scores("mask", &mask_layout, 4, |keys| keys.div_ceil(32))?,
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

/// Layouts of bias and mask, where the descriptor has them.
fn score_layouts(desc: &AttentionDesc, batch: &Batch) -> (ScoreLayout, ScoreLayout) {
    let of = |wanted: bool, layout: Option<ScoreLayout>| layout.filter(|_| wanted).unwrap_or_default();
    (of(desc.bias.is_some(), batch.bias_layout), of(desc.mask.is_some(), batch.mask_layout))
}

fn slot_bytes(v_dim: u32) -> u64 {
    u64::from(v_dim.next_multiple_of(4) + 4) * 4
}

/// Writes item lists, each at an offset that can be bound, and the dispatches that run them.
struct Writer<'a> {
    lists: Lists,
    desc: &'a AttentionDesc,
    bounds: Bounds,
    alignment: u64,
}

impl Writer<'_> {
    fn list<T: bytemuck::Pod>(&mut self, items: &[T]) -> std::ops::Range<u64> {
        let bytes = &mut self.lists.bytes;
        bytes.resize((bytes.len() as u64).next_multiple_of(self.alignment) as usize, 0);
        let start = bytes.len() as u64;
        bytes.extend_from_slice(bytemuck::cast_slice(items));
        start..bytes.len() as u64
    }

    /// Dispatches over `items`, as many as the limits on workgroups and work demand.
    fn attend(&mut self, short: bool, dest: Dest, items: &[Item]) {
        let dims = u64::from(self.desc.head_dim + self.desc.v_dim()) * u64::from(self.desc.kv_heads);
        let cost = |item: &Item| u64::from(item.row_count) * u64::from(item.kv_end - item.kv_begin) * dims;
        let mut rest = items;
        while !rest.is_empty() {
            let mut work = 0;
            let fits = |item: &&Item| {
                work += cost(item);
                work <= self.bounds.work
            };
            let count = rest.iter().take(self.bounds.dispatch).take_while(fits).count().max(1);
            let (now, later) = rest.split_at(count);
            let items = self.list(now);
            let grid = [count as u32, self.desc.kv_heads, 1];
            self.lists.planned.push(Planned { kernel: Kernel::Attend { short, dest }, items, grid });
            rest = later;
        }
    }

    /// One round over the workspace: as many tiles as it has room for, split into items, then merged. Returns the rest.
    fn round<'t>(&mut self, tiles: &'t [Tile], chunk: u32) -> Result<&'t [Tile]> {
        let slot = slot_bytes(self.desc.v_dim()) * u64::from(self.desc.kv_heads);
        let room = self.bounds.workspace / slot;
        let (mut slots, mut count) = (0u64, 0);
        let (mut short, mut tall, mut merges) = (Vec::new(), Vec::new(), Vec::new());
        for tile in tiles {
            let item = tile.item;
            let states = tile.keys().div_ceil(chunk);
            if states > self.bounds.states {
                let hint = "use fewer keys or longer chunks; this adapter's loops stop early";
                return Err(Error::limit("partial states of a row", self.bounds.states.into(), states.into(), hint));
            }
            let more = u64::from(states) * u64::from(item.row_count);
            if slots + more > room || merges.len() == self.bounds.dispatch {
                break;
            }
            for i in 0..states {
                let kv_begin = item.kv_begin + i * chunk;
                let kv_end = item.kv_end.min(kv_begin.saturating_add(chunk));
                let slot = (slots + u64::from(i) * u64::from(item.row_count)) as u32;
                let list = if tile.short { &mut short } else { &mut tall };
                list.push(Item { kv_begin, kv_end, slot, ..item });
            }
            merges.push(MergeItem {
                out: item.out,
                lse: item.lse,
                row_begin: item.row_begin,
                row_count: item.row_count,
                slot: slots as u32,
                states,
                ..MergeItem::default()
            });
            slots += more;
            count += 1;
        }
        if count == 0 {
            let need = u64::from(tiles[0].keys().div_ceil(chunk)) * u64::from(tiles[0].item.row_count) * slot;
            let hint = "one tile's partial states do not fit; use fewer keys or a device that binds more";
            return Err(Error::limit("bytes of partial states", self.bounds.workspace, need, hint));
        }
        self.attend(false, Dest::Partial, &tall);
        self.attend(true, Dest::Partial, &short);
        let rows = merges.iter().map(|merge| merge.row_count).max().unwrap_or(0);
        let items = self.list(&merges);
        let grid = [merges.len() as u32, self.desc.kv_heads, rows];
        self.lists.planned.push(Planned { kernel: Kernel::Merge, items, grid });
        self.lists.slots = self.lists.slots.max(slots);
        Ok(&tiles[count..])
    }
}
