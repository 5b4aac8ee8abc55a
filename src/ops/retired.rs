//! Buffers of dropped schedules and plans, for later ones: a server makes some a step.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Buffers `B` that no schedule or plan holds any more; commands in flight may.
#[derive(Debug)]
pub(crate) struct Retired<B> {
    buffers: Mutex<Vec<B>>,
}

impl<B> Default for Retired<B> {
    fn default() -> Self {
        Retired { buffers: Mutex::default() }
    }
}

/// Steps in flight at a time, and as many sizes.
const MOST_RETIRED: usize = 16;

impl<B> Retired<B> {
    fn lock(&self) -> MutexGuard<'_, Vec<B>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first that fits.
    pub(crate) fn take(&self, fits: impl Fn(&B) -> bool) -> Option<B> {
        let mut retired = self.lock();
        let found = retired.iter().position(fits)?;
        Some(retired.swap_remove(found))
    }

    pub(crate) fn put(&self, buffers: B) {
        let mut retired = self.lock();
        if retired.len() == MOST_RETIRED {
            retired.remove(0);
        }
        retired.push(buffers);
    }
}

/// Bytes of a buffer that is to be used again, where `needed` are needed now.
pub(crate) fn room_for(needed: u64, limits: &wgpu::Limits) -> u64 {
    needed.next_power_of_two().min(limits.max_buffer_size).max(needed)
}

/// Whether a buffer of `size` bytes is large enough, and not so large that later work may need it.
pub(crate) fn serves(size: u64, needed: u64) -> bool {
    (needed..=8 * needed).contains(&size)
}
