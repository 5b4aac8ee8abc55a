//! The work of a batch cut into items, on the CPU alone: tiles of rows, shared prefixes, chunks of keys, rounds of merging.

use std::cmp::Reverse;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::ops::attention::AttentionDesc;
use crate::ops::attention::batch::{Batch, Cascade, Lengths};
use crate::ops::attention::rows::{Dest, Form};
use crate::shader::shader_struct;

shader_struct! {
    pub(super) struct Item {
        q: u32,
        k: u32,
        v: u32,
        out: u32,
        lse: u32,
        bias: u32,
        bias_head: u32,
        bias_row: u32,
        mask: u32,
        mask_head: u32,
        mask_row: u32,
        row_begin: u32,
        row_count: u32,
        kv_begin: u32,
        kv_end: u32,
        q_pos: i32,
        slot: u32,
        table: u32,
    }
}

shader_struct! {
    pub(super) struct MergeItem {
        out: u32,
        lse: u32,
        row_begin: u32,
        row_count: u32,
        slots: u32,
        states: u32,
    }
}

const ITEM_WORDS: usize = Item::FIELDS.len();
const TABLE_WORD: usize = ITEM_WORDS - 1;

/// What the chosen row of a form can take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Height {
    /// Packed rows of a tile.
    pub(super) rows: u32,
    /// Keys of a step; chunks are multiples of it.
    pub(super) step: u32,
    /// What a key costs a tile, in rows of a tall one.
    pub(super) cost: u32,
    /// Keys of one item, from the adapter's loop limit and so that no workgroup runs for long.
    pub(super) keys: u32,
}

/// What a plan may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// By [`Form`]; at least one.
    pub(super) heights: [Option<Height>; 3],
    /// Workgroups to fill the device.
    pub(super) workgroups: u64,
    /// Bytes of partial states at a time.
    pub(super) workspace: u64,
    /// Items of a dispatch: workgroups in one dimension, and what can be bound.
    pub(super) dispatch: usize,
    /// Bytes of a binding.
    pub(super) binding: u64,
    /// Bytes that the start of a binding is a multiple of.
    pub(super) alignment: u32,
    /// States of a merge, from the adapter's loop limit.
    pub(super) states: u32,
    /// Multiply-adds of a dispatch, so that none runs into a watchdog.
    pub(super) work: u64,
}

/// A chunk of keys shorter than this is not worth a partial state.
const MIN_CHUNK: u32 = 128;

impl Bounds {
    fn height(&self, form: Form) -> Height {
        self.heights[form as usize].expect("only forms that are there are used")
    }

    /// Rows of the highest tiles.
    fn tallest(&self) -> u32 {
        self.heights.iter().flatten().map(|height| height.rows).max().unwrap_or(1)
    }

    /// The lowest form that takes `rows`, or else the highest.
    fn form(&self, rows: u64) -> Form {
        let there = |form: &Form| self.heights[*form as usize].is_some();
        let takes = |form: &Form| there(form) && u64::from(self.height(*form).rows) >= rows;
        let found = Form::ALL.into_iter().find(takes).or_else(|| Form::ALL.into_iter().rev().find(there));
        found.expect("an attention has a row")
    }
}

/// A tile of packed rows before its keys are split.
#[derive(Clone, Copy, Debug)]
struct Tile {
    item: Item,
    form: Form,
}

impl Tile {
    fn keys(&self) -> u32 {
        self.item.kv_end - self.item.kv_begin
    }
}

/// Where final rows get their states from: rows `row…` of a tile, all its chunks.
#[derive(Clone, Copy, Debug)]
struct Source {
    tile: usize,
    row: u32,
}

/// Rows that are merged from states of one or several tiles.
#[derive(Clone, Debug)]
struct Merge {
    item: MergeItem,
    sources: Range<usize>,
}

/// Tiles that leave partial states, and the merges that need just these.
#[derive(Clone, Debug)]
struct Cluster {
    tiles: Range<usize>,
    merges: Range<usize>,
}

/// One dispatch: which words of the plan it sees, and what it runs.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) kernel: Kernel,
    pub(super) words: Range<usize>,
    pub(super) items: usize,
    pub(super) grid: [u32; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    Attend { form: Form, dest: Dest },
    Merge,
}

/// A whole plan before it goes to the device.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) words: Vec<u32>,
    pub(super) dispatches: Vec<Planned>,
    /// Partial states, most at a time.
    pub(super) slots: u64,
    pub(super) splits: usize,
    /// Whether sequences share tiles, in which positions are not those of each.
    pub(super) cascades: bool,
    /// Where the page tables begin, if keys lie in pages.
    tables: Option<usize>,
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
    /// Position of packed row 0 among the keys.
    pub q_pos: i32,
    /// First of the pages, if keys lie in pages: an index into the batch's table.
    pub table: u32,
}

impl Plan {
    pub(super) fn items(&self) -> Vec<PlannedItem> {
        let mut out = Vec::new();
        for (dispatch, planned) in self.dispatches.iter().enumerate() {
            if planned.kernel == Kernel::Merge {
                continue;
            }
            let words = &self.words[planned.words.start..][..planned.items * ITEM_WORDS];
            out.extend(bytemuck::cast_slice::<u32, Item>(words).iter().map(|item| PlannedItem {
                dispatch,
                q: item.q,
                row_begin: item.row_begin,
                row_count: item.row_count,
                kv_begin: item.kv_begin,
                kv_end: item.kv_end,
                q_pos: item.q_pos,
                table: self.tables.map_or(0, |tables| planned.words.start as u32 + item.table - tables as u32),
            }));
        }
        out
    }
}

/// Bytes of one row's partial state.
pub(super) fn slot_bytes(v_dim: u32) -> u64 {
    u64::from(v_dim.next_multiple_of(4) + 4) * 4
}

/// Plans a batch whose numbers and offsets have been checked.
pub(super) fn plan(desc: &AttentionDesc, batch: &Batch, bounds: Bounds) -> Result<Plan> {
    match plan_once(desc, batch, bounds) {
        // All that shares a prefix is merged together; flat work needs less room at a time.
        Err(Error::Limit { .. }) if batch.cascade != Cascade::Never => {
            plan_once(desc, &Batch { cascade: Cascade::Never, ..*batch }, bounds)
        }
        result => result,
    }
}

fn plan_once(desc: &AttentionDesc, batch: &Batch, bounds: Bounds) -> Result<Plan> {
    let mut planner = Planner { desc, batch, bounds, tiles: Vec::new(), merges: Vec::new(), sources: Vec::new() };
    let (flat, shared) = planner.cut();
    let cost_of_item = planner.balance();
    let mut whole: Vec<Tile> = Vec::new();
    let cascades = !shared.is_empty();
    let mut clusters = shared;
    for i in flat {
        let tile = planner.tiles[i];
        if planner.chunk(&tile, cost_of_item) >= tile.keys() {
            whole.push(tile);
        } else {
            clusters.push(planner.split_alone(i));
        }
    }
    let plan = Plan { cascades, ..Plan::default() };
    let mut writer = Writer { plan, planner: &planner, cost_of_item };
    whole.sort_by_key(|tile| Reverse(tile.keys())); // longest first, so that the end is even
    for form in Form::ALL.into_iter().rev() {
        let items: Vec<Item> = whole.iter().filter(|tile| tile.form == form).map(|tile| tile.item).collect();
        writer.attend(form, Dest::Out, &items);
    }
    clusters.sort_by_key(|cluster| {
        let longest = planner.tiles[cluster.tiles.clone()].iter().map(|tile| planner.chunk(tile, cost_of_item)).max();
        Reverse(longest)
    });
    writer.plan.splits = clusters.iter().map(|cluster| cluster.merges.len()).sum();
    let mut rest = clusters.as_slice();
    while !rest.is_empty() {
        rest = writer.round(rest)?;
    }
    writer.tables()?;
    Ok(writer.plan)
}

struct Planner<'a> {
    desc: &'a AttentionDesc,
    batch: &'a Batch<'a>,
    bounds: Bounds,
    tiles: Vec<Tile>,
    merges: Vec<Merge>,
    sources: Vec<Source>,
}

impl Planner<'_> {
    /// Row 0 of sequence `b`, no keys.
    fn first(&self, b: usize) -> Item {
        let (desc, batch) = (self.desc, self.batch);
        let (bias, mask) = (batch.bias_of(desc, b), batch.mask_of(desc, b));
        let (k, v) = match batch.pages {
            None => (batch.kv.start(b, &batch.k_layout), batch.kv.start(b, &batch.v_layout)),
            Some(_) => (batch.k_layout.offset, batch.v_layout.offset),
        };
        Item {
            q: batch.q.start(b, &batch.q_layout) as u32,
            k: k as u32,
            v: v as u32,
            out: batch.q.start(b, &batch.out_layout) as u32,
            lse: batch.q.lse_place(b, desc.heads).0 as u32,
            bias: bias.offset as u32,
            bias_head: bias.head as u32,
            bias_row: bias.row as u32,
            mask: mask.offset as u32,
            mask_head: mask.head as u32,
            mask_row: mask.row as u32,
            q_pos: batch.start_of(b) as i32,
            table: batch.pages.map_or(0, |pages| pages.offsets[b]),
            ..Item::default()
        }
    }

    fn rows(&self, b: usize) -> u64 {
        u64::from(self.batch.q.len(b)) * u64::from(self.desc.group())
    }

    /// Cuts the batch into tiles of rows, each with the range of keys that any of its rows sees. Returns which stand alone,
    /// and which belong to shared prefixes.
    fn cut(&mut self) -> (Vec<usize>, Vec<Cluster>) {
        let mut alone = Vec::new();
        let mut shared = Vec::new();
        if self.batch.q.lse_rows() == 0 {
            return (alone, shared); // however many sequences
        }
        let prefixes = self.shared_pages();
        let mut b = 0;
        while b < self.batch.q.batch() {
            let mut end = b + 1;
            if let Some(prefixes) = &prefixes {
                end = prefixes.run(b, 0).min(b + self.bounds.dispatch);
                if end > b + 1 && self.shared_height(b..end).is_some() {
                    shared.push(self.cascade(b..end, prefixes));
                } else {
                    end = b + 1;
                }
            }
            if end == b + 1 {
                let first = self.tiles.len();
                self.tile(b, 0);
                alone.extend(first..self.tiles.len());
            }
            b = end;
        }
        (alone, shared)
    }

    /// Tiles of one sequence, from key `first_key` on.
    fn tile(&mut self, b: usize, first_key: u32) {
        let group = u64::from(self.desc.group());
        let (first, rows) = (self.first(b), self.rows(b));
        let mut row = 0;
        while row < rows {
            let form = self.bounds.form(rows - row);
            let count = (rows - row).min(self.bounds.height(form).rows.into());
            let (first_token, last_token) = (row / group, (row + count - 1) / group);
            // Ranges of later rows start and end later, so the tile's reaches from the first's start to the last's end.
            let low = self.batch.visible(self.desc, b, first_token as u32).start.max(first_key);
            let high = self.batch.visible(self.desc, b, last_token as u32).end;
            let (kv_begin, kv_end) = if low < high { (low, high) } else { (0, 0) };
            let item = Item { row_begin: row as u32, row_count: count as u32, kv_begin, kv_end, ..first };
            self.tiles.push(Tile { item, form });
            row += count;
        }
    }

    fn cost(&self, tile: &Tile) -> u64 {
        u64::from(tile.keys()) * u64::from(self.bounds.height(tile.form).cost)
    }

    /// Rows of the tiles in which keys that these sequences share cost least; none where tiles of each cost no more.
    fn shared_height(&self, run: Range<usize>) -> Option<u32> {
        let cost = |rows: u64| u64::from(self.bounds.height(self.bounds.form(rows)).cost);
        let flat: u64 = run.clone().map(|b| cost(self.rows(b))).sum(); // one tile each, see `shared_pages`
        let rows: u64 = run.clone().map(|b| self.rows(b)).sum();
        let most = run.map(|b| self.rows(b)).max().unwrap_or(0);
        let together = |height: &Height| {
            let full = rows / u64::from(height.rows) * u64::from(height.cost);
            let rest = rows % u64::from(height.rows);
            (full + if rest > 0 { cost(rest) } else { 0 }, Reverse(height.rows)) // of equals the highest: it reads least
        };
        // Lower tiles would hold one sequence, which shares with none; the highest hold two, see `shared_pages`.
        let heights = self.bounds.heights.iter().flatten().filter(|height| u64::from(height.rows) >= 2 * most);
        let (shared, Reverse(height)) = heights.map(together).min()?;
        (self.batch.cascade == Cascade::Always || shared < flat).then_some(height)
    }

    /// What one item should cost: the least with which all items fit on the device at once, or where the tiles alone are
    /// more than that, an even share of all work.
    fn balance(&self) -> u64 {
        let heads = u64::from(self.desc.kv_heads);
        let costs: Vec<u64> = self.tiles.iter().map(|tile| self.cost(tile)).collect();
        let total = costs.iter().sum::<u64>().saturating_mul(heads);
        let share = total.div_ceil(self.bounds.workgroups).max(1);
        if costs.len() as u64 * heads >= self.bounds.workgroups {
            return 2 * share; // the longest start first, so that the end is even
        }
        let items = |cost: u64| costs.iter().map(|all| all.div_ceil(cost).max(1)).sum::<u64>() * heads;
        let (mut low, mut high) = (share, costs.iter().copied().max().unwrap_or(1).max(share));
        while low < high {
            let middle = low + (high - low) / 2;
            if items(middle) <= self.bounds.workgroups { high = middle } else { low = middle + 1 }
        }
        low
    }

    /// Keys of an item of this tile: as few items as the cost and the limits allow, of about equal length.
    fn chunk(&self, tile: &Tile, cost_of_item: u64) -> u32 {
        let Height { cost, step, keys, .. } = self.bounds.height(tile.form);
        let most = (keys / step).max(1); // in steps
        let wanted = cost_of_item.div_ceil(cost.into()).min(u64::from(u32::MAX / 2)) as u32;
        let chunk = wanted.max(MIN_CHUNK).div_ceil(step).min(most) * step;
        let items = tile.keys().div_ceil(chunk).max(1);
        tile.keys().div_ceil(items).div_ceil(step).max(1) * step
    }

    /// A tile that is split and merged by itself.
    fn split_alone(&mut self, tile: usize) -> Cluster {
        let item = self.tiles[tile].item;
        let sources = self.sources.len()..self.sources.len() + 1;
        self.sources.push(Source { tile, row: 0 });
        self.merges.push(Merge { item: merge_of(&item), sources });
        Cluster { tiles: tile..tile + 1, merges: self.merges.len() - 1..self.merges.len() }
    }

    /// What sequences share, if a cascade is possible: all their rows see all of the shared keys alike.
    fn shared_pages(&self) -> Option<Shared> {
        let (desc, batch) = (self.desc, self.batch);
        let pages = batch.pages.filter(|_| batch.cascade != Cascade::Never)?;
        let sequences = batch.q.batch();
        if desc.bias.is_some() || desc.mask.is_some() || desc.alibi.is_some() || sequences < 2 {
            return None;
        }
        token_stride(batch)?;
        let tallest = self.bounds.tallest();
        // In a tile of many sequences the rows stand one after the other, behind the shared keys: none may be farther from the
        // first key than the window reaches.
        let reached = desc.effective_window().left.map_or(u32::MAX, |left| left.saturating_sub(tallest));
        // Whole pages that all rows of a sequence see; none for one that fills tiles by itself.
        let usable = |b: usize| match batch.q.len(b) {
            0 => 0,
            _ if 2 * self.rows(b) > u64::from(tallest) => 0,
            rows => {
                let starts_at_0 = batch.visible(desc, b, rows - 1).start == 0;
                if starts_at_0 { batch.visible(desc, b, 0).end.min(reached) / pages.page_len } else { 0 }
            }
        };
        let mut depths = Vec::with_capacity(sequences);
        let mut before = usable(0);
        for b in 1..sequences {
            let now = usable(b);
            let most = before.min(now) as usize;
            let (left, right) = (&pages.of(b - 1)[..most], &pages.of(b)[..most]);
            depths.push(left.iter().zip(right).take_while(|(a, b)| a == b).count() as u32);
            before = now;
        }
        depths.push(0);
        let least = MIN_SHARED.div_ceil(pages.page_len);
        depths.iter().any(|depth| *depth >= least).then_some(Shared { depths, least, page_len: pages.page_len })
    }

    /// Tiles over what the sequences of a run share, level by level, and over what each has for itself; and the merges.
    fn cascade(&mut self, run: Range<usize>, shared: &Shared) -> Cluster {
        let first_tile = self.tiles.len();
        let first_merge = self.merges.len();
        let mut sources: Vec<Vec<Source>> = vec![Vec::new(); run.len()];
        self.levels(run.clone(), shared, &mut sources);
        for (b, sources) in run.zip(sources) {
            let first = self.sources.len();
            self.sources.extend(sources);
            let item = Item { row_count: self.rows(b) as u32, ..self.first(b) };
            self.merges.push(Merge { item: merge_of(&item), sources: first..self.sources.len() });
        }
        Cluster { tiles: first_tile..self.tiles.len(), merges: first_merge..self.merges.len() }
    }

    fn levels(&mut self, all: Range<usize>, shared: &Shared, sources: &mut [Vec<Source>]) {
        let origin = all.start;
        // Sequences that share their first pages, so many, which are done. There may be as many levels as sequences.
        let mut levels = vec![(all, 0)];
        while let Some((run, depth)) = levels.pop() {
            let mut b = run.start;
            while b < run.end {
                let mut end = shared.run(b, depth).min(run.end);
                let height = if end > b + 1 { self.shared_height(b..end) } else { None };
                if let Some(height) = height {
                    let deeper = shared.depths[b..end - 1].iter().copied().min().unwrap_or(depth);
                    let keys = depth * shared.page_len..deeper * shared.page_len;
                    self.share(b..end, keys, height, origin, sources);
                    levels.push((b..end, deeper));
                } else {
                    end = b + 1;
                    let tile = self.tiles.len();
                    self.tile(b, depth * shared.page_len); // one tile: `shared_pages` takes no sequence of more rows
                    if self.tiles[tile].keys() > 0 || sources[b - origin].is_empty() {
                        sources[b - origin].push(Source { tile, row: 0 });
                    } else {
                        self.tiles.truncate(tile);
                    }
                }
                b = end;
            }
        }
    }

    /// Tiles of at most `height` rows over keys that all sequences of `run` share, as many whole sequences in each as fit.
    fn share(&mut self, run: Range<usize>, keys: Range<u32>, height: u32, origin: usize, sources: &mut [Vec<Source>]) {
        let mut b = run.start;
        while b < run.end {
            let (begin, mut rows) = (b, 0);
            while b < run.end && (rows == 0 || rows + self.rows(b) <= height.into()) {
                sources[b - origin].push(Source { tile: self.tiles.len(), row: rows as u32 });
                rows += self.rows(b);
                b += 1;
            }
            let item = Item {
                row_begin: 0,
                row_count: rows as u32,
                kv_begin: keys.start,
                kv_end: keys.end,
                q_pos: keys.end as i32, // all rows see all of these keys
                ..self.first(begin)
            };
            self.tiles.push(Tile { item, form: self.bounds.form(rows) });
        }
    }
}

/// The distance from a token of Q to the next, across sequences too; none where it differs.
pub(super) fn token_stride(batch: &Batch) -> Option<u64> {
    match batch.q {
        Lengths::Ragged { .. } => Some(batch.q_layout.seq),
        Lengths::Uniform { len: 1, .. } => Some(batch.q_layout.batch),
        Lengths::Uniform { len, .. } => {
            let next = u64::from(len).checked_mul(batch.q_layout.seq);
            (next == Some(batch.q_layout.batch)).then_some(batch.q_layout.seq)
        }
        Lengths::Padded { .. } => None,
    }
}

/// Shared keys fewer than these are not worth a partial state.
const MIN_SHARED: u32 = 256;

/// How many first pages neighbouring sequences have in common.
struct Shared {
    depths: Vec<u32>, // of sequences b and b + 1
    least: u32,       // pages that are worth sharing
    page_len: u32,
}

impl Shared {
    /// The end of the run of sequences from `b` on that share more pages than `depth`.
    fn run(&self, b: usize, depth: u32) -> usize {
        b + 1 + self.depths[b..].iter().take_while(|shared| **shared >= depth + self.least).count()
    }
}

fn merge_of(item: &Item) -> MergeItem {
    MergeItem {
        out: item.out,
        lse: item.lse,
        row_begin: item.row_begin,
        row_count: item.row_count,
        ..MergeItem::default()
    }
}

/// Writes item lists, each at an offset that can be bound, and the dispatches that run them.
struct Writer<'a> {
    plan: Plan,
    planner: &'a Planner<'a>,
    cost_of_item: u64,
}

impl Writer<'_> {
    fn start_list(&mut self) -> usize {
        let words = &mut self.plan.words;
        words.resize(words.len().next_multiple_of(self.planner.bounds.alignment as usize / 4), 0);
        words.len()
    }

    /// Dispatches over `items`, as many as the limits on workgroups and work demand.
    fn attend(&mut self, form: Form, dest: Dest, items: &[Item]) {
        let (desc, bounds) = (self.planner.desc, &self.planner.bounds);
        let dims = u64::from(desc.head_dim + desc.v_dim()) * u64::from(desc.kv_heads);
        let cost = |item: &Item| u64::from(item.row_count) * u64::from(item.kv_end - item.kv_begin) * dims;
        let mut rest = items;
        while !rest.is_empty() {
            let mut work = 0;
            let fits = |item: &&Item| {
                work += cost(item);
                work <= bounds.work
            };
            let count = rest.iter().take(bounds.dispatch).take_while(fits).count().max(1);
            let (now, later) = rest.split_at(count);
            let start = self.start_list();
            self.plan.words.extend_from_slice(bytemuck::cast_slice(now));
            self.plan.dispatches.push(Planned {
                kernel: Kernel::Attend { form, dest },
                words: start..self.plan.words.len(),
                items: count,
                grid: [count as u32, desc.kv_heads, 1],
            });
            rest = later;
        }
    }

    /// One round over the workspace: as many clusters as it has room for, split into items, then merged. Returns the rest.
    fn round<'t>(&mut self, clusters: &'t [Cluster]) -> Result<&'t [Cluster]> {
        let planner = self.planner;
        let bounds = &planner.bounds;
        let slot = slot_bytes(planner.desc.v_dim()) * u64::from(planner.desc.kv_heads);
        let room = bounds.workspace / slot;
        let chunks = |tile: &Tile| {
            let chunk = planner.chunk(tile, self.cost_of_item);
            (chunk, tile.keys().div_ceil(chunk).max(1))
        };
        let (mut slots, mut count) = (0u64, 0);
        let mut lists: [Vec<Item>; 3] = Default::default();
        let (mut merges, mut merge_slots) = (Vec::<MergeItem>::new(), Vec::<u32>::new());
        let mut first_slots: Vec<(usize, u32)> = Vec::new(); // of the tiles of a cluster
        for cluster in clusters {
            let tiles = &planner.tiles[cluster.tiles.clone()];
            let states = |tile: &Tile| u64::from(chunks(tile).1) * u64::from(tile.item.row_count);
            let more: u64 = tiles.iter().map(states).sum();
            if count > 0 && (slots + more > room || merges.len() + cluster.merges.len() > bounds.dispatch) {
                break;
            }
            if more > room {
                let hint = "the partial states of rows that are merged together do not fit; use fewer keys, turn `cascade` \
                            off, or use a device that binds more";
                return Err(Error::limit("bytes of partial states", bounds.workspace, more * slot, hint));
            }
            first_slots.clear();
            for tile in tiles {
                first_slots.push((slots as usize, chunks(tile).1));
                let (chunk, states) = chunks(tile);
                for i in 0..states {
                    let kv_begin = tile.item.kv_begin + i * chunk;
                    let kv_end = tile.item.kv_end.min(kv_begin.saturating_add(chunk));
                    lists[tile.form as usize].push(Item { kv_begin, kv_end, slot: slots as u32, ..tile.item });
                    slots += u64::from(tile.item.row_count);
                }
            }
            for merge in &planner.merges[cluster.merges.clone()] {
                let first = merge_slots.len();
                for source in &planner.sources[merge.sources.clone()] {
                    let tile = source.tile - cluster.tiles.start;
                    let (start, states) = first_slots[tile];
                    let pitch = tiles[tile].item.row_count;
                    merge_slots.extend((0..states).map(|i| start as u32 + i * pitch + source.row));
                }
                let states = (merge_slots.len() - first) as u32;
                if states > bounds.states {
                    let hint = "use fewer keys or longer chunks; this adapter's loops stop early";
                    return Err(Error::limit("partial states of a row", bounds.states.into(), states.into(), hint));
                }
                merges.push(MergeItem { slots: first as u32, states, ..merge.item });
            }
            count += 1;
        }
        for form in Form::ALL.into_iter().rev() {
            self.attend(form, Dest::Partial, &lists[form as usize]);
        }
        let rows = merges.iter().map(|merge| merge.row_count).max().unwrap_or(0);
        let after = (merges.len() * MergeItem::FIELDS.len()) as u32;
        merges.iter_mut().for_each(|merge| merge.slots += after);
        let start = self.start_list();
        self.plan.words.extend_from_slice(bytemuck::cast_slice(&merges));
        self.plan.words.extend_from_slice(&merge_slots);
        self.plan.dispatches.push(Planned {
            kernel: Kernel::Merge,
            words: start..self.plan.words.len(),
            items: merges.len(),
            grid: [merges.len() as u32, planner.desc.kv_heads, rows],
        });
        self.plan.slots = self.plan.slots.max(slots);
        Ok(&clusters[count..])
    }

    /// Appends the page tables, lets every item find its own, and checks what dispatches bind.
    fn tables(&mut self) -> Result<()> {
        let plan = &mut self.plan;
        if let Some(pages) = self.planner.batch.pages
            && !plan.words.is_empty()
        {
            let tables = plan.words.len();
            plan.tables = Some(tables);
            let used = pages.offsets[pages.batch()] as usize;
            plan.words.extend_from_slice(&pages.pages[..used]);
            for planned in plan.dispatches.iter_mut().filter(|planned| planned.kernel != Kernel::Merge) {
                let list = &mut plan.words[planned.words.start..][..planned.items * ITEM_WORDS];
                for item in list.chunks_exact_mut(ITEM_WORDS) {
                    item[TABLE_WORD] += (tables - planned.words.start) as u32;
                }
                planned.words.end = tables + used;
            }
        }
        for planned in &plan.dispatches {
            let bytes = 4 * planned.words.len() as u64;
            if bytes > self.planner.bounds.binding {
                let hint = "the device binds no more; use longer pages or split the batch";
                return Err(Error::limit("bytes of a plan", self.planner.bounds.binding, bytes, hint));
            }
        }
        Ok(())
    }
}
