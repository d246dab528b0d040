// The first kernel of a device-driven layer step: from router ids to work items, with the residency tables in device
// memory. Least recently used, as policy/lru.rs: a step's experts are accessed in order of first use, and none of them
// gives up its slot for another.
#include "record.cuh"

// As src/backend/cuda/resolve.rs counts them.
constexpr uint32_t kMostAssignments = 1024, kMostSlots = 1024, kNone = 0xffffffffu;

enum FaultKind : uint32_t { FAULT_NONE = 0, FAULT_BAD_WEIGHT = 1, FAULT_UNKNOWN_EXPERT = 2 };

// What was wrong with the routing of the first step that could not be served.
struct Fault {
    uint32_t kind;
    uint32_t layer;
    uint32_t token;
    uint32_t value;  // bits of the weight, or the id
};

struct Counters {
    uint64_t steps;
    uint64_t steps_with_miss;
    uint64_t accesses;
    uint64_t hits;
};

struct Resolve {
    const uint32_t* ids;     // [assignments]
    const float* weights;    // [assignments]
    uint32_t* slot_of;       // [records] slot of a record, or kNone
    const uint64_t* address; // [records] where kernels read a record in page-locked memory
    uint32_t* owner;         // [slots of the pool] record in a slot, or kNone
    uint64_t* stamp;         // [slots of the pool] when its record was last accessed; 0: free
    uint64_t* clock;         // the next stamp of this partition, above all that it has given
    Counters* counters;      // of this layer
    Fault* fault;            // set: nothing runs until the host has seen it
    volatile Fault* host;    // the same in page-locked memory, which the host polls
    Item* items;             // [min(assignments, experts)], those that are not needed with count 0
    uint32_t* list;          // [assignments] grouped by item
    float* factors;          // [assignments] what `combine` multiplies with
    uint64_t pool;           // address of slot 0
    uint64_t stride;         // bytes from slot to slot
    uint32_t assignments;
    uint32_t top_k;
    uint32_t experts;
    uint32_t first_record;   // of this layer
    uint32_t first_slot;     // of this layer's partition
    uint32_t slots;          // of it
    uint32_t layer;          // ordinal
    uint32_t weight_on_input;
};
static_assert(sizeof(Resolve) == 152 && sizeof(Fault) == 16 && sizeof(Counters) == 32, "mirrored structs");

// One block of at least as many threads as assignments: thread t has assignment t.
extern "C" __global__ void __launch_bounds__(1024) resolve(const Resolve r) {
    __shared__ uint32_t ids[kMostAssignments], first[kMostAssignments], victims[kMostAssignments];
    __shared__ uint64_t stamps[kMostSlots];
    __shared__ bool missing[kMostAssignments];
    __shared__ uint32_t bad;
    const uint32_t t = threadIdx.x, n = r.assignments;
    const bool mine = t < n;
    const uint32_t id = mine ? r.ids[t] : 0;
    const float weight = mine ? r.weights[t] : 0.f;
    const bool stopped = r.fault->kind != FAULT_NONE;
    const uint64_t now = *r.clock;
    if (t == 0) bad = kNone;
    if (mine) ids[t] = id;
    __syncthreads();

    // The host driver looks at weights first, too.
    if (mine && !isfinite(weight)) {
        atomicMin(&bad, t);
    } else if (mine && id >= r.experts) {
        atomicMin(&bad, n + t);
    }
    __syncthreads();
    if (stopped || bad != kNone) {
        // Nothing is computed, and nobody can take the result for one: NaN.
        if (mine) r.factors[t] = __int_as_float(0x7fffffff);
        if (t < min(n, r.experts)) r.items[t] = Item{0, 0, 0, 0};
        if (!stopped && t == 0) {
            const uint32_t at = bad < n ? bad : bad - n;
            const Fault fault = {bad < n ? FAULT_BAD_WEIGHT : FAULT_UNKNOWN_EXPERT, r.layer, at / r.top_k,
                                 bad < n ? __float_as_uint(r.weights[at]) : ids[at]};
            *r.fault = fault;
            r.host->layer = fault.layer;
            r.host->token = fault.token;
            r.host->value = fault.value;
            __threadfence_system();
            r.host->kind = fault.kind;
        }
        return;
    }

    // The assignment that named this expert first leads.
    uint32_t leader = t;
    if (mine) {
        for (uint32_t a = 0; a < t; a++) {
            if (ids[a] == id) {
                leader = a;
                break;
            }
        }
    }
    const bool leads = mine && leader == t;
    const uint32_t record = r.first_record + id;
    const uint32_t where = leads ? r.slot_of[record] : kNone;
    if (mine) {
        first[t] = leader;
        missing[t] = leads && where == kNone;
    }
    const uint32_t unique = __syncthreads_count(leads);
    const uint32_t misses = __syncthreads_count(leads && where == kNone);

    // Places: of the expert in order of first use, among the misses, and of its assignments in the list.
    uint32_t rank = 0, miss = 0, begin = 0, inside = 0, count = 0;
    if (mine) {
        for (uint32_t a = 0; a < n; a++) {
            const uint32_t f = first[a];
            rank += f == a && a < leader;
            miss += missing[a] && a < leader;
            begin += f < leader;
            inside += f == leader && a < t;
            count += f == leader;
        }
    }
    const uint64_t stamp = now + rank;
    if (leads && where != kNone) r.stamp[where] = stamp;

    if (misses > 0) {
        victims[t] = kNone;
        __syncthreads();  // every hit is stamped, so no member of the set is below `now`
        for (uint32_t s = t; s < r.slots; s += blockDim.x) stamps[s] = r.stamp[r.first_slot + s];
        __syncthreads();
        // The m-th miss takes the m-th oldest; free slots are older than all, in ascending order.
        for (uint32_t s = t; s < r.slots; s += blockDim.x) {
            const uint64_t age = stamps[s];
            if (age >= now) continue;
            uint32_t older = 0;
            for (uint32_t o = 0; o < r.slots; o++) older += stamps[o] < age || (stamps[o] == age && o < s);
            if (older < misses) victims[older] = r.first_slot + s;
        }
        __syncthreads();
    }

    if (leads) {
        Item item = {0, 0, begin, count};
        if (where != kNone) {
            item.src = r.pool + where * r.stride;
        } else {
            item.src = r.address[record];
            const uint32_t slot = victims[miss];
            // Without a victim it is read and not stored.
            if (slot != kNone) {
                const uint32_t old = r.owner[slot];
                if (old != kNone) r.slot_of[old] = kNone;
                r.owner[slot] = record;
                r.slot_of[record] = slot;
                r.stamp[slot] = stamp;
                item.dst = r.pool + slot * r.stride;
            }
        }
        r.items[rank] = item;
    }
    if (mine) {
        r.list[begin + inside] = t;
        r.factors[t] = r.weight_on_input ? 1.f : weight;
    }
    if (t >= unique && t < min(n, r.experts)) r.items[t] = Item{0, 0, 0, 0};
    if (t == 0) {
        *r.clock = now + unique;
        r.counters->steps += 1;
        r.counters->steps_with_miss += misses > 0;
        r.counters->accesses += unique;
        r.counters->hits += unique - misses;
    }
}
