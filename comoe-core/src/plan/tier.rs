//! How many records RAM holds where it cannot hold all, beside how many slots: [`CacheOptions::ram`].

use super::{Room, SlotPlan};
use crate::cache::{CacheOptions, Capacity};
use crate::error::{Error, Result, slots_by_use};
use crate::stats::human_bytes;
use crate::store::Directory;

/// Records on their way from disk at once, at least: the CPU's slots are filled one after the other.
const LEAST_ON_CPU: usize = 1;
/// A GPU's two copy queues each copy from a place while the next is filled.
const LEAST_ON_GPU: usize = 4;

/// `room` in host memory, where [`CacheOptions::ram`] bounds what slots take of it: what is read at once has places beside
/// them, since a record in a slot is no slower than one beside it, and needs no copy. `None` where nothing is bounded.
pub(super) fn narrowed(options: &CacheOptions, directory: &Directory, room: &Room) -> Option<Room> {
    let ram = options.ram.filter(|_| !room.on_device)?;
    let slot = directory.largest_record() as u64;
    let fit = usize::try_from(ram / slot.max(1)).unwrap_or(usize::MAX);
    let least = fewest(options, directory);
    let places = match fit >= directory.len() {
        true => 0,
        // A step's misses, and those of the next.
        false => (2 * options.top_k).min(fit / 4).min(fit.saturating_sub(least)).max(LEAST_ON_CPU),
    };
    // What a budget leaves counts as well; what others take is not of `ram`.
    let free = ram.saturating_sub(places as u64 * slot).saturating_add(room.reserve);
    Some(Room { free, ..room.clone() })
}

/// The fewest slots that work, those for what is prefetched included.
fn fewest(options: &CacheOptions, directory: &Directory) -> usize {
    let capacity = Capacity::Slots(options.top_k.clamp(1, directory.len().max(1)));
    let options = CacheOptions { capacity, ring: Some(0), ..options.clone() };
    let plan = SlotPlan::new(&options, directory, directory.largest_record(), None);
    plan.map_or(0, |plan| plan.slots + plan.staging)
}

/// Records that RAM holds beside the slots; `None` where it has room for all that are not in slots.
///
/// # Errors
/// [`Error::BadArgument`] for less RAM than works: what it takes, and what would do.
pub(crate) fn places(
    options: &CacheOptions,
    directory: &Directory,
    plan: SlotPlan,
    slot_bytes: usize,
    on_gpu: bool,
) -> Result<Option<usize>> {
    let Some(ram) = options.ram else { return Ok(None) };
    let place = directory.largest_record() as u64;
    let slots = plan.slots + plan.staging + plan.ring;
    // A GPU's slots are elsewhere.
    let in_slots = if on_gpu { 0 } else { slots as u64 * slot_bytes as u64 };
    let resident = !on_gpu && plan.slots == directory.len();
    if (resident && ram >= in_slots) || ram >= in_slots.saturating_add(place * directory.len() as u64) {
        return Ok(None);
    }
    let least = if on_gpu { LEAST_ON_GPU } else { LEAST_ON_CPU };
    let places = ram.saturating_sub(in_slots) / place;
    if places >= least as u64 {
        return Ok(Some(usize::try_from(places).unwrap_or(usize::MAX)));
    }
    let (asked, what) = (human_bytes(ram), human_bytes(least as u64 * place));
    let needs = (in_slots + least as u64 * place).div_ceil(1024);
    let reason = match on_gpu {
        true => format!(
            "{asked} hold fewer than the {least} experts ({what}) that are on their way from disk to the GPU at once: give \
             {needs}K or more"
        ),
        false => {
            let advice = match (slots > fewest(options, directory), plan.staging > 0) {
                (true, _) => ", or fewer slots",
                (false, true) => ", or no prefetching (--prefetch off)",
                (false, false) => "",
            };
            let what_slots = match plan.staging + plan.ring {
                0 => format!("{slots} slots"),
                _ => slots_by_use(slots, plan.staging, plan.ring),
            };
            format!(
                "{asked} are too little: {what_slots} take {} of it, and an expert on its way from disk {what}: give \
                 {needs}K or more{advice}",
                human_bytes(in_slots)
            )
        }
    };
    Err(Error::BadArgument { what: "ram", reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: u64 = 512;

    /// Two layers of eight records, of which a token uses two in each.
    fn planned(options: CacheOptions, on_gpu: bool) -> Result<(usize, Option<usize>)> {
        let directory = Directory::new([(0, 8, RECORD as usize), (1, 8, RECORD as usize)]).unwrap();
        let options = CacheOptions { top_k: 2, ..options };
        let (free, budget) = (u64::MAX, options.budget);
        let room = Room { device: "this machine".to_owned(), free, budget, reserve: 1000, on_device: on_gpu };
        let plan = SlotPlan::new(&options, &directory, RECORD as usize, Some(&room))?;
        Ok((plan.slots, places(&options, &directory, plan, RECORD as usize, on_gpu)?))
    }

    fn with(ram: u64, capacity: Capacity) -> CacheOptions {
        CacheOptions { ram: Some(ram * RECORD), capacity, ..CacheOptions::default() }
    }

    #[test]
    fn ram_is_divided_between_slots_and_records_on_their_way() {
        // Of 3 to 15 records' room; more holds everything.
        for ram in 3..16 {
            let (slots, places) = planned(with(ram, Capacity::Fit), false).unwrap();
            assert!(slots >= 2 && (1..=4).contains(&places.unwrap()), "{ram}: {slots}, {places:?}");
            assert_eq!(slots + places.unwrap(), ram as usize);
        }
        assert_eq!(planned(with(16, Capacity::Fit), false).unwrap(), (16, None));
        assert_eq!(planned(with(16, Capacity::All), false).unwrap(), (16, None));
        assert_eq!(planned(with(12, Capacity::Slots(5)), false).unwrap(), (5, Some(7)));
        assert_eq!(planned(with(21, Capacity::Slots(5)), false).unwrap(), (5, None));
        assert_eq!(planned(CacheOptions::default(), false).unwrap(), (16, None));
    }

    #[test]
    fn slots_of_a_gpu_take_no_ram() {
        assert_eq!(planned(with(4, Capacity::Slots(15)), true).unwrap(), (15, Some(4)));
        assert_eq!(planned(with(15, Capacity::All), true).unwrap(), (16, Some(15)));
        assert_eq!(planned(with(16, Capacity::Slots(2)), true).unwrap(), (2, None));
    }

    #[test]
    fn too_little_ram_says_how_much_would_do() {
        let said = |options, on_gpu| planned(options, on_gpu).unwrap_err().to_string();
        let text = said(with(6, Capacity::Slots(6)), false);
        for part in
            ["3.0 KiB are too little", "6 slots take 3.0 KiB", "512 B", "give 4K or more, or fewer slots"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = said(with(2, Capacity::Slots(2)), false);
        assert!(text.contains("give 2K or more") && !text.contains("fewer slots"), "{text}");
        let text = said(with(3, Capacity::All), true);
        assert!(text.contains("the 4 experts (2.0 KiB)") && text.contains("give 2K"), "{text}");
        let text = said(with(0, Capacity::Fit), false);
        assert!(text.contains("give 2K or more"), "{text}");
        let staged = CacheOptions { prefetch: crate::Prefetch::Auto, ..with(4, Capacity::Fit) };
        let text = said(staged, false);
        assert!(text.contains("give 4K or more"), "{text}");
        assert!(text.contains("6 slots (2 for experts, 4 for what is prefetched)"), "{text}");
        assert!(text.contains("--prefetch off"), "{text}");
    }
}
