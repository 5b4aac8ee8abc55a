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
