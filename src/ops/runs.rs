//! What `append` and `gather` share: runs of neighbouring tokens, moved from rows of one tensor to rows of another.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernel::Pipeline;
use crate::ops::retired::{room_for, serves};
use crate::runtime::Runtime;
use crate::shader::shader_struct;
use crate::view::{DType, Layout, View, bind_view, bytes_of, check_input, check_strides};

shader_struct! {
    pub(crate) struct Run {
        block: u32,
        slot: u32,
        to_block: u32,
        to_slot: u32,
        tokens: u32,
        position: u32,
    }
}

shader_struct! {
    pub(crate) struct Rows {
        first: u32,
        block: u32,
        slot: u32,
        head: u32,
        to_first: u32,
        to_block: u32,
        to_slot: u32,
        to_head: u32,
        runs: u32,
        heads: u32,
        dim: u32,
        team_rows: u32,
        stays: u32,
        pairs: u32,
        interleaved: u32,
        factor: f32,
    }
}

/// Which WGSL file has which of these structs, for the test that compares them.
#[doc(hidden)]
pub const STRUCTS: &[(&str, &str, &[&str])] =
    &[("parts/runs", "Run", Run::FIELDS), ("parts/runs", "Rows", Rows::FIELDS)];

/// Lanes of a workgroup.
const WORKGROUP: u64 = 64;
/// Workgroups that keep a large GPU busy; beyond, each team moves more rows, which share what a lane works out for a token.
const MANY_GROUPS: u64 = 512;
const MOST_TEAM_ROWS: u64 = 8;
const MOST_GROUPS: u32 = 65_535;
/// All runs get the workgroups that the longest needs.
const MOST_TOKENS: u32 = 64;

/// Where a token lies: a page or a sequence, and which token of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) block: u32,
    pub(super) slot: u32,
}

/// Tokens to be moved, neighbours together.
#[derive(Debug, Default)]
pub(super) struct Runs(Vec<Run>);

impl Runs {
    /// One token more.
    pub(super) fn push(&mut self, at: Place, to: Place, position: u32) {
        if let Some(last) = self.0.last_mut()
            && (last.block, last.to_block) == (at.block, to.block)
            && last.tokens < MOST_TOKENS
            && [(last.slot, at.slot), (last.to_slot, to.slot), (last.position, position)]
                .iter()
                .all(|(first, next)| first.checked_add(last.tokens) == Some(*next))
        {
            last.tokens += 1;
            return;
        }
        let (Place { block, slot }, Place { block: to_block, slot: to_slot }) = (at, to);
        self.0.push(Run { block, slot, to_block, to_slot, tokens: 1, position });
    }

    /// Refuses two tokens for one place.
    pub(super) fn check_apart(&self, what: &str) -> Result<()> {
        let mut targets: Vec<_> = self.0.iter().map(|run| (run.to_block, run.to_slot, run.tokens)).collect();
        targets.sort_unstable();
        for pair in targets.windows(2) {
            let ((block, slot, tokens), (next_block, next_slot, _)) = (pair[0], pair[1]);
            if block == next_block && next_slot - slot < tokens {
                let given = format!("two for slot {next_slot} of page or sequence {block}");
                return Err(Error::shape(what, "one token for each place", given));
            }
        }
        Ok(())
    }

    fn sources(&self) -> impl Iterator<Item = (Place, u32)> {
        self.0.iter().map(|run| (Place { block: run.block, slot: run.slot }, run.tokens))
    }

    fn targets(&self, stays: bool) -> impl Iterator<Item = (Place, u32)> {
        let target = move |run: &Run| match stays {
            true => Place { block: run.block, slot: run.slot },
            false => Place { block: run.to_block, slot: run.to_slot },
        };
        self.0.iter().map(move |run| (target(run), run.tokens))
    }
}

/// A tensor of rows: blocks of tokens of heads. `Layout::batch` is the distance between blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    pub(super) what: &'static str,
    pub(super) layout: Layout,
    pub(super) dtype: DType,
    /// Slots of a block, if blocks are so long; for the check that places are apart.
    pub(super) slots: Option<u32>,
}

impl Tensor {
    /// Bytes that these places reach, if a binding and offsets of 32 bits carry them.
    fn reach(
        &self,
        places: impl Iterator<Item = (Place, u32)>,
        heads: u32,
        dim: u32,
        limits: &wgpu::Limits,
    ) -> Result<u64> {
        let layout = &self.layout;
        let far = |count: u32, stride: u64| u64::from(count).saturating_mul(stride);
        let last = places
            .map(|(place, tokens)| {
                let slot = u64::from(place.slot) + u64::from(tokens) - 1;
                far(place.block, layout.batch).saturating_add(slot.saturating_mul(layout.seq))
            })
            .max();
        let Some(last) = last else { return Ok(0) };
        let elements =
            [layout.offset, last, far(heads - 1, layout.head), dim.into()].into_iter().fold(0, u64::saturating_add);
        bytes_of(self.what, elements, self.dtype, limits)
    }

    /// Strides and counts of the dimensions; refuses those under which two of these places share an element.
    fn check_distinct(
        &self,
        places: impl Iterator<Item = (Place, u32)>,
        heads: u32,
        dim: u64,
    ) -> Result<[(u64, u64); 3]> {
        let (mut blocks, mut slots) = (0, 0);
        for (place, tokens) in places {
            blocks = blocks.max(u64::from(place.block) + 1);
            slots = slots.max(u64::from(place.slot) + u64::from(tokens));
        }
        let slots = self.slots.map_or(slots, u64::from);
        let layout = &self.layout;
        let dims = [(layout.head, heads.into()), (layout.seq, slots), (layout.batch, blocks)];
        check_strides(self.what, &mut dims.to_vec(), dim)?;
        Ok(dims)
    }
}

/// A tensor that is written, with all its parts.
#[derive(Debug)]
struct Target {
    what: &'static str,
    first: u64,
    dims: [(u64, u64); 3],
    dim: u64,
    dtype: DType,
    reach: u64,
}

impl Target {
    /// Refuses another one that writes to the same elements. They may lie between each other, as K and V of each page or
    /// token: then the distance from one to the other is one more dimension.
    fn check_apart(&self, view: View, other: &Target, other_view: View) -> Result<()> {
        let end = |view: View, reach: u64| view.offset.saturating_add(reach);
        if view.buffer != other_view.buffer
            || view.offset >= end(other_view, other.reach)
            || other_view.offset >= end(view, self.reach)
        {
            return Ok(());
        }
        let first = |view: View, of: &Target| (view.offset / of.dtype.size()).saturating_add(of.first);
        let between = first(view, self).abs_diff(first(other_view, other));
        let alike = self.dtype == other.dtype && self.dims == other.dims;
        let mut dims = [self.dims.as_slice(), &[(between, 2)]].concat();
        match alike && check_strides(self.what, &mut dims, self.dim.max(other.dim)).is_ok() {
            true => Ok(()),
            false => {
                let expected = format!("elements apart from those of {}", other.what);
                Err(Error::shape(self.what, expected, "some of the same"))
            }
        }
    }
}

/// Pairs of dims that are turned on the way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Turn {
    pub(super) pairs: u32,
    pub(super) interleaved: bool,
    pub(super) factor: f32,
}

/// One tensor's part of a move.
pub(super) struct Part {
    pub(super) pipeline: Arc<Pipeline>,
    pub(super) source: Tensor,
    pub(super) target: Tensor,
    pub(super) heads: u32,
    pub(super) dim: u32,
    pub(super) unit: Unit,
    pub(super) stays: bool,
    pub(super) turn: Turn,
}

/// What a kernel counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Element,
    Bytes(u64),
}

/// The widest unit of `gather.wgsl` that both layouts and `dim` elements are multiples of.
pub(super) fn unit_of(a: &Layout, b: &Layout, dim: u32, dtype: DType) -> u64 {
    let sizes = [a.offset, a.batch, a.seq, a.head, b.offset, b.batch, b.seq, b.head, dim.into()];
    let all = |unit: u64| sizes.iter().all(|size| size.saturating_mul(dtype.size()).is_multiple_of(unit));
    [16, 4].into_iter().find(|unit| all(*unit)).unwrap_or(2)
}

/// A dispatch whose parameters are on the device.
#[derive(Debug)]
struct Step {
    pipeline: Arc<Pipeline>,
    rows: std::ops::Range<u64>, // bytes in the buffer
    grid: [u32; 3],
    source: &'static str,
    target: &'static str,
    reach: u64,
    target_reach: u64,
}

/// What moves hold on the device. Commands that use it hold a clone of `in_use` until the device is done with them.
#[derive(Debug)]
pub(crate) struct Buffers {
    lists: wgpu::Buffer,
    in_use: Arc<()>,
}

/// Parts of one list of runs, with all their parameters in one buffer, which serves later moves once these are dropped and the
/// device is done with all commands that use them.
#[derive(Debug)]
pub(super) struct Moves {
    runtime: Runtime,
    buffers: Option<Buffers>, // none if there is nothing to do
    runs: std::ops::Range<u64>,
    steps: Vec<Step>,
    targets: Vec<Target>,
}

impl Drop for Moves {
    fn drop(&mut self) {
        if let Some(buffers) = self.buffers.take() {
            self.runtime.retired_moves().put(buffers);
        }
    }
}

/// Buffers of earlier moves with this much room that no command uses any more, or new ones.
fn buffers(runtime: &Runtime, bytes: &[u8]) -> Result<Buffers> {
    let needed = bytes.len() as u64;
    let fits = |buffers: &Buffers| serves(buffers.lists.size(), needed) && Arc::strong_count(&buffers.in_use) == 1;
    let buffers = match runtime.retired_moves().take(fits) {
        Some(buffers) => buffers,
        None => {
            let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
            let room = room_for(needed, &runtime.caps().limits);
            Buffers { lists: runtime.buffer("runs", room, usage)?, in_use: Arc::default() }
        }
    };
    runtime.queue().write_buffer(&buffers.lists, 0, bytes);
    Ok(buffers)
}

impl Moves {
    pub(super) fn new(runtime: &Runtime, runs: &Runs, parts: Vec<Part>) -> Result<Moves> {
        let limits = &runtime.caps().limits;
        let alignment =
            u64::from(limits.min_storage_buffer_offset_alignment.max(limits.min_uniform_buffer_offset_alignment));
        let list: &[u8] = bytemuck::cast_slice(&runs.0);
        let most = limits.max_storage_buffer_binding_size;
        if list.len() as u64 > most {
            return Err(Error::limit("bytes of the list of runs", most, list.len() as u64, "split the batch"));
        }
        let mut bytes: Vec<u8> = Vec::with_capacity(parts.len() * alignment as usize + list.len());
        let mut steps = Vec::with_capacity(parts.len());
        let mut targets = Vec::new();
        let tokens: u64 = runs.0.iter().map(|run| u64::from(run.tokens)).sum();
        let longest = runs.0.iter().map(|run| run.tokens).max().unwrap_or(0);
        for part in parts {
            let reach = part.source.reach(runs.sources(), part.heads, part.dim, limits)?;
            let target_reach = part.target.reach(runs.targets(part.stays), part.heads, part.dim, limits)?;
            let Tensor { what, layout, dtype, .. } = part.target;
            let before = targets.iter().find(|target: &&Target| target.what == what).map_or(0, |target| target.dim);
            let dim = before + u64::from(part.dim); // of this row up to here
            let dims = part.target.check_distinct(runs.targets(part.stays), part.heads, dim)?;
            match targets.iter_mut().find(|target: &&mut Target| target.what == what) {
                None => targets.push(Target { what, first: layout.offset, dims, dim, dtype, reach: target_reach }),
                Some(target) => {
                    target.dim = dim;
                    target.reach = target.reach.max(target_reach);
                }
            }
            // Checked above: where a stride is used at all, it fits.
            let unit = |elements: u64, dtype: DType| match part.unit {
                Unit::Element => elements as u32,
                Unit::Bytes(bytes) => (elements.saturating_mul(dtype.size()) / bytes) as u32,
            };
            let (a, b) = (&part.source, &part.target);
            let dim = unit(part.dim.into(), a.dtype);
            let units = match part.unit {
                Unit::Element => part.turn.pairs.div_ceil(4) + (dim - 2 * part.turn.pairs).div_ceil(4),
                Unit::Bytes(_) => dim,
            };
            let teams = WORKGROUP / u64::from(units).min(WORKGROUP);
            let (all_rows, run_rows) = (tokens * u64::from(part.heads), u64::from(longest) * u64::from(part.heads));
            let team_rows = (all_rows / (teams * MANY_GROUPS)).clamp(1, MOST_TEAM_ROWS);
            let team_rows = team_rows.max(run_rows.div_ceil(teams * u64::from(MOST_GROUPS)));
            let rows = Rows {
                first: unit(a.layout.offset, a.dtype),
                block: unit(a.layout.batch, a.dtype),
                slot: unit(a.layout.seq, a.dtype),
                head: unit(a.layout.head, a.dtype),
                to_first: unit(b.layout.offset, b.dtype),
                to_block: unit(b.layout.batch, b.dtype),
                to_slot: unit(b.layout.seq, b.dtype),
                to_head: unit(b.layout.head, b.dtype),
                runs: runs.0.len() as u32,
                heads: part.heads,
                dim,
                team_rows: team_rows as u32,
                stays: part.stays.into(),
                pairs: part.turn.pairs,
                interleaved: part.turn.interleaved.into(),
                factor: part.turn.factor,
            };
            let count = runs.0.len() as u32;
            let start = bytes.len() as u64;
            bytes.extend_from_slice(bytemuck::bytes_of(&rows));
            let end = bytes.len() as u64;
            bytes.resize(bytes.len().next_multiple_of(alignment as usize), 0);
            steps.push(Step {
                pipeline: part.pipeline,
                rows: start..end.next_multiple_of(16),
                grid: [
                    count.min(MOST_GROUPS),
                    count.div_ceil(MOST_GROUPS),
                    run_rows.div_ceil(teams * team_rows).max(1) as u32,
                ],
                source: a.what,
                target: b.what,
                reach,
                target_reach,
            });
        }
        let start = bytes.len() as u64;
        bytes.extend_from_slice(list);
        Ok(Moves {
            buffers: (!list.is_empty()).then(|| buffers(runtime, &bytes)).transpose()?,
            runs: start..bytes.len() as u64,
            steps,
            targets,
            runtime: runtime.clone(),
        })
    }

    /// Checks the buffers of all tensors, which `views` names, and binds those of each step.
    pub(super) fn bind(
        &self,
        views: &[(&str, View)],
        frequencies: Option<&wgpu::Buffer>,
    ) -> Result<Vec<wgpu::BindGroup>> {
        self.runtime.check_lost()?;
        let limits = &self.runtime.caps().limits;
        let view = |what: &str| {
            let found = views.iter().find(|(name, _)| *name == what);
            found.map(|(_, view)| *view).ok_or_else(|| Error::shape(what, "a buffer, as the descriptor says", "none"))
        };
        let targets = self.targets.iter().map(|target| view(target.what)).collect::<Result<Vec<_>>>()?;
        for (i, target) in self.targets.iter().enumerate() {
            for (other, other_view) in self.targets.iter().zip(&targets).take(i) {
                target.check_apart(targets[i], other, *other_view)?;
            }
        }
        let mut groups = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let (source, target) = (view(step.source)?, view(step.target)?);
            check_input(step.source, source, &targets)?;
            let Some(Buffers { lists, .. }) = &self.buffers else { continue };
            let source = bind_view(step.source, Some(source), step.reach, limits)?;
            let target = bind_view(step.target, Some(target), step.target_reach, limits)?;
            let part = |range: &std::ops::Range<u64>| wgpu::BufferBinding {
                buffer: lists,
                offset: range.start,
                size: wgpu::BufferSize::new(range.end - range.start),
            };
            groups.push(step.pipeline.bind(self.runtime.device(), |name| match name {
                "rows" => Some(part(&step.rows)),
                "runs" => Some(part(&self.runs)),
                "source" | "source_data" => source.clone(),
                "destination" | "cache_data" => target.clone(),
                "frequencies" => frequencies.map(wgpu::Buffer::as_entire_buffer_binding),
                _ => None,
            })?);
        }
        Ok(groups)
    }

    /// Appends all parts as one compute pass.
    pub(super) fn dispatch(&self, label: &str, encoder: &mut wgpu::CommandEncoder, groups: &[wgpu::BindGroup]) {
        if self.buffers.is_none() {
            return;
        }
        let mut pass =
            encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: Some(label), timestamp_writes: None });
        self.dispatch_in(&mut pass, groups);
    }

    /// The same into a compute pass.
    pub(super) fn dispatch_in(&self, pass: &mut wgpu::ComputePass, groups: &[wgpu::BindGroup]) {
        let Some(buffers) = &self.buffers else { return };
        let in_use = buffers.in_use.clone();
        pass.on_submitted_work_done(move || drop(in_use));
        for (step, group) in self.steps.iter().zip(groups) {
            pass.set_pipeline(&step.pipeline.pipeline);
            pass.set_bind_group(0, group, &[]);
            let [x, y, z] = step.grid;
            pass.dispatch_workgroups(x, y, z);
        }
    }

    pub(super) fn is_of(&self, runtime: &Runtime) -> Result<()> {
        match self.runtime.is(runtime) {
            true => Ok(()),
            false => Err(Error::shape("plan", "one made on the same Runtime", "another Runtime's")),
        }
    }
}
