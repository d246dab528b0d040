// The first kernel of a device-driven layer step: from router ids to work items, with the residency tables in device
// memory. Least recently used, as policy/lru.rs, or by decayed counts, as policy/lfru.rs: a step's experts are accessed
// in order of first use, and none of them gives up its slot for another.
#include "ahead.cuh"
#include "correlate.cuh"
#include "early.cuh"
#include "record.cuh"
#include "spans.cuh"

// As src/backend/device.rs and, the last one, src/backend/cuda/resolve.rs count them.
constexpr uint32_t kMostAssignments = kMostChosen, kMostSlots = 1024, kKept = 0x80000000u;

enum FaultKind : uint32_t {
    FAULT_NONE = 0,
    FAULT_BAD_WEIGHT = 1,
    FAULT_UNKNOWN_EXPERT = 2,
    FAULT_MISSING = 3,
    FAULT_LATE = 4,
};

// Why the first step that could not be served was not.
struct Fault {
    uint32_t kind;
    uint32_t layer;
    uint32_t token;
    uint32_t value;  // bits of the weight, the id, how many records are missing, or which device is late
};

// Which steps of the token under way are done. The host sets `again` before a token is run again.
struct Progress {
    uint32_t done;
    uint32_t again;
    uint32_t missed;  // records that steps have missed since these tables were handed over
    uint32_t unused;
};

struct Counters {
    uint64_t steps;
    uint64_t steps_with_miss;
    uint64_t accesses;
    uint64_t hits;
};

// What the host is to bring, and where to.
struct Missing {
    uint32_t record;
    uint32_t slot;
};

// Slots that compete. How many there are is read here at every step, so that a graph holds when it changes.
struct Partition {
    uint64_t clock;  // its next access, from 1
    uint32_t first;  // where its slots begin in `slots`
    uint32_t count;
};

struct Resolve {
    const uint32_t* ids;     // [assignments]
    const float* weights;    // [assignments]
    const uint32_t* numbers; // [all] number of each of the layer's experts on this device, or kNone: another owns it; null: all are here
    uint32_t* slot_of;       // [records] slot of a record, or kNone
    const uint64_t* address; // [records] where kernels read a record in page-locked memory; 0: only the host can
    uint32_t* owner;         // [slots of the pool] record in a slot, with kKept if it stays for good; or kNone
    uint64_t* stamp;         // [slots of the pool] its record's last access, or its score; the lowest leaves; 0: free
    uint64_t* score;         // [records] bits of the log2 of their decayed counts, 0: none yet; null: least recently used
    Partition* partition;    // this layer's
    const uint32_t* slots;   // [slots of the pool] by partition, ascending
    const uint32_t* place;   // [slots of the pool] of a slot among its partition's
    Counters* counters;      // of this layer
    uint32_t* uses;          // [records] how often each was a member of a set
    Progress* progress;
    Missing* missing;        // [assignments] with FAULT_MISSING
    Fault* fault;            // set: nothing runs until the host has seen it
    volatile Fault* host;    // the same in page-locked memory, which the host polls
    Item* items;             // [min(assignments, experts)], those that are not needed with count 0
    Item* fills;             // as many: records that another kernel brings into slots first; null: there is none
    uint32_t* list;          // [assignments] grouped by item
    float* factors;          // [assignments] what `combine` multiplies with
    uint64_t pool;           // address of slot 0
    uint64_t stride;         // bytes from slot to slot
    double half_life;        // of a count, in accesses
    uint32_t assignments;
    uint32_t top_k;
    uint32_t experts;        // of this layer, on this device
    uint32_t first_record;   // of this layer
    uint32_t layer;          // ordinal
    uint32_t weight_on_input;
    uint32_t ordinal;        // of the step in its token
    uint32_t all;            // experts of this layer, on all devices
    Ahead* ahead;            // where records are brought ahead; else null
    Foresight* foresight;    // of this layer
    uint32_t record_bytes;   // of this layer, as they are read
    uint32_t parts;          // whether kernels take a record of which some is there
    SpanLog* log;            // where it is taken down when misses are read through; null: nowhere
};
static_assert(sizeof(Resolve) == 256 && sizeof(Fault) == 16 && sizeof(Counters) == 32, "mirrored structs");
static_assert(sizeof(Progress) == 16 && sizeof(Missing) == 8 && sizeof(Partition) == 16, "mirrored structs");

template <int N>
__device__ __forceinline__ double series(const double (&coefficients)[N], double x) {
    double sum = 0.0;
#pragma unroll
    for (int k = N - 1; k >= 0; k--) sum = __dadd_rn(__dmul_rn(sum, x), coefficients[k]);
    return sum;
}

// log2(2^a + 2^b): policy/lfru.rs's function, operation by operation, so that both decide alike.
__device__ __forceinline__ double log2_of_sum(double a, double b) {
    constexpr double kExp[13] = {1.0,           1.0,            1.0 / 2.0,       1.0 / 6.0,        1.0 / 24.0,
                                 1.0 / 120.0,   1.0 / 720.0,    1.0 / 5040.0,    1.0 / 40320.0,    1.0 / 362880.0,
                                 1.0 / 3628800.0, 1.0 / 39916800.0, 1.0 / 479001600.0};
    constexpr double kAtanh[14] = {1.0,        1.0 / 3.0,  1.0 / 5.0,  1.0 / 7.0,  1.0 / 9.0,  1.0 / 11.0, 1.0 / 13.0,
                                   1.0 / 15.0, 1.0 / 17.0, 1.0 / 19.0, 1.0 / 21.0, 1.0 / 23.0, 1.0 / 25.0, 1.0 / 27.0};
    constexpr double kLn2 = 0.693147180559945309417232121458, kLog2E = 1.44269504088896340735992468100;
    const double high = a > b ? a : b, low = a > b ? b : a, difference = __dadd_rn(low, -high);
    if (difference < -64.0) return high;
    const double whole = floor(__dadd_rn(difference, 0.5));
    const double power = series(kExp, __dmul_rn(__dadd_rn(difference, -whole), kLn2));
    const double t = __dmul_rn(power, __longlong_as_double((1023 + (long long)whole) << 52));
    const double u = __ddiv_rn(t, __dadd_rn(2.0, t));
    return __dadd_rn(high, __dmul_rn(2.0 * kLog2E, __dmul_rn(u, series(kAtanh, __dmul_rn(u, u)))));
}

// The score of a record after access number `tick` of its partition.
__device__ __forceinline__ uint64_t raised(uint64_t score, uint64_t tick, double half_life) {
    const double now = __ddiv_rn(double(tick), half_life);
    const double sum = score == 0 ? now : log2_of_sum(__longlong_as_double((long long)score), now);
    return uint64_t(__double_as_longlong(sum));
}

__device__ __forceinline__ void tell_host(const Resolve& r, const Fault& fault) {
    *r.fault = fault;
    r.host->layer = fault.layer;
    r.host->token = fault.token;
    r.host->value = fault.value;
    __threadfence_system();
    r.host->kind = fault.kind;
}

// One block of at least as many threads as assignments: thread t has assignment t. `given_ids` and `given_weights` are r's
// own, or copies of them.
__device__ __forceinline__ void resolve_block(const Resolve& r, const uint32_t* given_ids, const float* given_weights) {
    __shared__ uint32_t ids[kMostAssignments], first[kMostAssignments], victims[kMostAssignments];
    __shared__ uint64_t stamps[kMostSlots];
    __shared__ uint32_t owners[kMostSlots], slots[kMostSlots];
    __shared__ bool missing[kMostAssignments], taken[kMostSlots];
    __shared__ uint32_t bad, used;
    __shared__ Arrived arrived;
    // The next kernel may be set up from here on; like this one, it waits before it reads what the one before it writes.
    let_dependents_start();
    wait_for_previous();
    const uint32_t t = threadIdx.x, n = r.assignments;
    // From here on the link is this layer's.
    uint32_t brought = 0;
    if (r.ahead && t < kCopyBlocks) brought = atomicOr(&r.ahead->state[t], kClosed);
    Chosen* const chosen = r.ahead ? r.ahead->chosen : nullptr;
    const uint32_t worth = r.ahead && t == 0 ? r.foresight->worth : 0;
    const bool given = t < n, has_item = t < min(n, r.experts);
    const uint32_t asked = given ? given_ids[t] : 0;
    const uint32_t id = r.numbers && asked < r.all ? r.numbers[asked] : asked;
    const bool mine = given && id != kNone;
    const float weight = given ? given_weights[t] : 0.f;
    const bool stopped = r.fault->kind != FAULT_NONE;
    const Partition partition = *r.partition;
    const uint64_t now = partition.clock;
    const Progress progress = *r.progress;
    if (t == 0) {
        bad = kNone;
        used = 0;
    }
    if (given) ids[t] = id;
    __syncthreads();

    // Nothing is computed, and nobody can take the result for one: NaN.
    auto stop = [&] {
        if (given) r.factors[t] = __int_as_float(0x7fffffff);
        if (has_item) {
            r.items[t] = Item{};
            if (r.fills) r.fills[t] = Item{};
        }
    };

    // The host driver looks at weights first, too.
    if (given && !isfinite(weight)) {
        atomicMin(&bad, t);
    } else if (given && asked >= r.all) {
        atomicMin(&bad, n + t);
    }
    __syncthreads();
    if (stopped || bad != kNone) {
        stop();
        if (!stopped && t == 0) {
            const uint32_t at = bad < n ? bad : bad - n;
            tell_host(r, Fault{bad < n ? FAULT_BAD_WEIGHT : FAULT_UNKNOWN_EXPERT, r.layer, at / r.top_k,
                               bad < n ? __float_as_uint(given_weights[at]) : given_ids[at]});
        }
        return;
    }

    // The assignment that named this expert first leads.
    uint32_t leader = t;
    if (mine) {
        // From the last on, so that no comparison waits for the one before it.
#pragma unroll 4
        for (uint32_t a = t; a-- > 0;) leader = ids[a] == id ? a : leader;
    }
    const bool leads = mine && leader == t;
    const uint32_t record = r.first_record + id;
    const uint32_t where = leads ? r.slot_of[record] : kNone;
    const uint64_t address = leads ? r.address[record] : 0;
    const uint64_t score = leads && r.score ? r.score[record] : 0;
    if (given) {
        first[t] = mine ? leader : kNone;
        missing[t] = leads && where == kNone;
    }
    const uint32_t unique = __syncthreads_count(leads);
    const uint32_t misses = __syncthreads_count(leads && where == kNone);
    const bool needs_host = misses > 0 && __syncthreads_or(leads && where == kNone && address == 0);

    // A token that is run again has had its first steps already; whatever they brought is still there.
    const uint32_t done = r.ordinal == 0 && !progress.again ? 0 : progress.done;
    const bool was_done = r.ordinal < done && misses == 0;

    // Places: of the expert in order of first use, among the misses, and of its assignments in the list.
    uint32_t rank = 0, miss = 0, begin = 0, inside = 0, count = 0;
    if (mine) {
#pragma unroll 4
        for (uint32_t a = 0; a < n; a++) {
            const uint32_t f = first[a];
            rank += f == a && a < leader;
            miss += missing[a] && a < leader;
            begin += f < leader;
            inside += f == leader && a < t;
            count += f == leader;
        }
    }
    uint64_t stamp = now + rank;
    if (leads && r.score && !was_done) {
        stamp = raised(score, stamp, r.half_life);
        r.score[record] = stamp;
    }
    if (leads && where != kNone && !was_done) r.stamp[where] = stamp;
    if (leads && !was_done) atomicAdd(&r.uses[record], 1u);

    const uint32_t competing = partition.count;
    if (misses > 0) {
        const uint32_t place = leads && where != kNone ? r.place[where] : 0;
        for (uint32_t s = t; s < competing; s += blockDim.x) {
            const uint32_t slot = r.slots[partition.first + s];
            slots[s] = slot;
            stamps[s] = r.stamp[slot];
            owners[s] = r.owner[slot];
            taken[s] = owners[s] != kNone && (owners[s] & kKept);
        }
        victims[t] = kNone;
        __syncthreads();
        if (leads && where != kNone) taken[place] = true;
        __syncthreads();
        // The m-th miss takes the slot with the m-th lowest stamp outside the set, of equals that of the lower record;
        // free slots come first, in ascending order.
        auto tie = [&](uint32_t s) { return stamps[s] == 0 ? s : owners[s]; };
        for (uint32_t s = t; s < competing; s += blockDim.x) {
            if (taken[s]) continue;
            uint32_t lower = 0;
            for (uint32_t o = 0; o < competing; o++) {
                lower += !taken[o] && (stamps[o] < stamps[s] || (stamps[o] == stamps[s] && tie(o) < tie(s)));
            }
            if (lower < misses) victims[lower] = s;
        }
        __syncthreads();
    }
    if (r.ahead) {
        if (t < 32) find_arrived(*r.ahead, r.layer, r.record_bytes, brought, t, arrived);
        __syncthreads();
    }

    if (leads) {
        Item item = {};
        item.first = begin;
        item.count = count;
        if (where != kNone) {
            item.src = r.pool + where * r.stride;
        } else {
            item.src = address;
            const uint32_t victim = victims[miss], slot = victim == kNone ? kNone : slots[victim];
            // Without a victim it is read and not stored.
            if (slot != kNone) {
                const uint32_t old = owners[victim];
                if (old != kNone) r.slot_of[old] = kNone;
                r.owner[slot] = record;
                r.slot_of[record] = slot;
                r.stamp[slot] = stamp;
                item.dst = r.pool + slot * r.stride;
            }
            if (r.ahead) {
#pragma unroll
                for (uint32_t g = 0; g < kMostGuesses; g++) {
                    if (arrived.record[g] != record) continue;
                    atomicOr(&used, 1u << g);
                    const uint64_t staged = r.ahead->staging[r.layer % 2][g];
                    if (arrived.ready[g] == r.record_bytes) {
                        item.src = staged;
                    } else if (r.parts) {
                        item.staged = staged;
                        item.ready = arrived.ready[g];
                    }
                }
            }
            if (r.log && item.dst && !needs_host) {
                const uint32_t staged = item.src == address ? item.ready : r.record_bytes;
                Span* span = take_span(r.log);
                if (span) *span = Span{~0ull, 0, record, r.record_bytes - staged, staged, 0};
                item.span = reinterpret_cast<uint64_t>(span);
            }
            if (r.fills) {
                // Another kernel reads it through, before anyone multiplies.
                r.fills[miss] = Item{item.src, item.dst, 0, 0, 1, 0, 0, item.span};
                item.src = item.dst;
                item.dst = 0;
                item.ready = 0;
            }
            if (needs_host) r.missing[miss] = Missing{record, slot};
        }
        if (!needs_host) r.items[rank] = item;
    }
    if (t == 0) {
        // Of a step that is run again nothing is missed.
        *r.progress = Progress{was_done ? done : r.ordinal + 1, 0, progress.missed + misses, 0};
        if (!was_done) {
            r.partition->clock = now + unique;
            r.counters->steps += 1;
            r.counters->steps_with_miss += misses > 0;
            r.counters->accesses += unique;
            r.counters->hits += unique - misses;
        }
    }
    if (chosen) leave_chosen(chosen[r.layer], asked, t, n, !was_done);
    if (r.ahead) {
        __syncthreads();  // `used` is whole
        // Nobody waits for these. Of a step that is run again they were counted: what it missed is in its slots by now.
        if (t < kMostGuesses && arrived.record[t] != kNone && !was_done) {
            Foresight& f = *r.foresight;
            const bool right = used >> t & 1;
            const uint32_t ready = arrived.ready[t];
            atomicAdd(&f.guessed, 1ull);
            if (right) atomicAdd(&f.right, 1ull);
            if (ready > 0) {
                atomicAdd(&f.brought, 1ull);
                atomicAdd(&f.bytes, (unsigned long long)ready);
                const bool taken = right && !needs_host && (r.parts || ready == r.record_bytes);
                if (taken) {
                    atomicAdd(&f.used, 1ull);
                    atomicAdd(&f.saved_bytes, (unsigned long long)ready);
                }
            }
            // Its time constant is 32 guesses; what is not brought is judged as well, and so comes back.
            if (t == 0) f.worth = worth - worth / 32 + (right ? 65535 / 32 : 0);
        }
        // The next layer's guesses may be brought; there is no word that is taken.
        if (t < kCopyBlocks) r.ahead->state[t] = r.layer << kOrdinalShift;
    }
    if (needs_host) {
        __syncthreads();  // fills are cleared, and the host is told, after all of the above
        stop();
        if (t == 0) tell_host(r, Fault{FAULT_MISSING, r.layer, 0, misses});
        return;
    }
    if (mine) r.list[begin + inside] = t;
    if (given) r.factors[t] = r.weight_on_input ? 1.f : weight;
    if (t >= unique && has_item) r.items[t] = Item{};
    if (r.fills && t >= misses && has_item) r.fills[t] = Item{};
}

extern "C" __global__ void __launch_bounds__(1024) resolve(const Resolve r) { resolve_block(r, r.ids, r.weights); }
