// Brings a layer's guessed records while the layer before computes: see ahead.cuh.
#include "ahead.cuh"
#include "spans.cuh"

struct Fetch {
    const uint32_t* guess;      // [guesses] experts of the next layer, likeliest first
    const uint32_t* slot_of;    // [records], as in resolve.cu
    const uint64_t* address;    // [records]
    const Foresight* foresight; // of the next layer
    Ahead* ahead;
    uint32_t guesses;           // at most 32
    uint32_t experts;           // of the next layer
    uint32_t first_record;      // of the next layer
    uint32_t bytes;             // of its records, a multiple of 16
    uint32_t layer;             // ordinal of the layer that this comes behind
    uint32_t least_worth;       // bring only where guesses have been worth that lately
    uint32_t delay;             // for tests: cycles that a thread may lose here and there
    uint32_t unused;
    SpanLog* log;               // where it is taken down when; null: nowhere
};
static_assert(sizeof(Fetch) == 80, "mirrored structs");

__device__ __forceinline__ void lose_time(uint32_t most, uint32_t& seed) {
    if (most == 0) return;
    seed = seed * 1664525u + 1013904223u + uint32_t(clock64());
    const long long since = clock64(), lost = seed % most;
    while (clock64() - since < lost) {
    }
}

extern "C" __global__ void __launch_bounds__(kCopyThreads) fetch(const Fetch f) {
    extern __shared__ uint4 stages[];  // [kStages][kLoads][kCopiers]
    __shared__ uint32_t chosen[kMostGuesses], width, least;
    __shared__ volatile uint32_t stop, finished;
    Ahead& a = *f.ahead;
    uint32_t* state = &a.state[blockIdx.x];
    const uint32_t parity = (f.layer + 1) % 2, lane = threadIdx.x % 32;
    uint32_t seed = 977u * blockIdx.x + threadIdx.x;
    if (threadIdx.x < 32) {
        bool mine = false;
        if (lane == 0) {
            lose_time(f.delay, seed);
            const uint32_t open = f.layer << kOrdinalShift;
            // Anything else means that this comes too late.
            mine = atomicCAS(state, open, open | kTaken | kSeen) == open;
        }
        // The next layer waits for the word before it changes any of this; what is read here without the word is dropped.
        const uint32_t id = lane < f.guesses ? f.guess[lane] : kNone, record = f.first_record + id;
        const bool absent = id < f.experts && f.slot_of[record] == kNone && f.address[record] != 0;
        const uint32_t all = __ballot_sync(0xffffffffu, absent), rank = __popc(all & ((1u << lane) - 1));
        if (lane < kMostGuesses) chosen[lane] = kNone;
        __syncwarp();
        if (absent && rank < kMostGuesses) chosen[rank] = record;
        mine = __shfl_sync(0xffffffffu, mine, 0);
        const uint32_t brings = f.foresight->worth >= f.least_worth ? min(uint32_t(__popc(all)), kMostGuesses) : 0;
        __syncwarp();
        if (lane == 0) {
            width = mine ? brings : kNone;
            least = kCount;
            stop = finished = 0;
        }
        if (mine && blockIdx.x == 0 && lane < kMostGuesses) {
            a.record[parity][lane] = chosen[lane];
            if (lane == 0) a.width[parity] = brings;
        }
    }
    __syncthreads();
    if (width == kNone) return;
    const unsigned long long begun = f.log ? gpu_time() : 0;
    // Which of the requests for that layer this is: it is counted when it is closed, and was for something.
    const uint32_t request = f.log ? uint32_t(f.foresight->guessed) + 1 : 0;

    const uint32_t each = (f.bytes + kPieceBytes - 1) / kPieceBytes, pieces = each * width;
    if (threadIdx.x < kCopiers) {
        const uint32_t my = 16 * threadIdx.x;
        const char* from[kMostGuesses];
        char* to[kMostGuesses];
#pragma unroll
        for (uint32_t g = 0; g < kMostGuesses; g++) {
            from[g] = g < width ? reinterpret_cast<const char*>(f.address[chosen[g]]) + my : nullptr;
            to[g] = reinterpret_cast<char*>(a.staging[parity][g]) + my;
        }
        const uint32_t shared = uint32_t(__cvta_generic_to_shared(stages + threadIdx.x));
        auto load = [&](uint32_t piece, uint32_t stage) {
            if (piece < pieces) {
                const uint32_t at = (piece < each ? piece : piece - each) * kPieceBytes;
                const char* src = (piece < each ? from[0] : from[1]) + at;
#pragma unroll
                for (uint32_t i = 0; i < kLoads; i++) {
                    if (at + my + i * 16 * kCopiers < f.bytes) {
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                         shared + 16 * kCopiers * (stage * kLoads + i)),
                                     "l"(src + i * 16 * kCopiers)
                                     : "memory");
                    }
                }
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        auto store = [&](uint32_t piece, uint32_t stage) {
            const uint32_t at = (piece < each ? piece : piece - each) * kPieceBytes;
            char* dst = (piece < each ? to[0] : to[1]) + at;
#pragma unroll
            for (uint32_t i = 0; i < kLoads; i++) {
                if (at + my + i * 16 * kCopiers < f.bytes) {
                    *reinterpret_cast<uint4*>(dst + i * 16 * kCopiers) =
                        stages[(stage * kLoads + i) * kCopiers + threadIdx.x];
                }
            }
        };
        uint32_t piece = blockIdx.x, stage = 0, done = 0, left = kNone;
#pragma unroll
        for (uint32_t k = 0; k + 1 < kStages; k++) load(piece + k * kCopyBlocks, k);
        // A thread copies what it asked for itself, so no thread waits for another. Once the word is closed nothing more is
        // asked for; what is under way arrives before anything that is asked for later, so it is kept.
        while (piece < pieces) {
            if (left == kNone && stop) left = kStages - 1;
            if (left == 0) break;
            asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
            lose_time(f.delay, seed);
            store(piece, stage);
            const bool more = left == kNone;
            load(more ? piece + (kStages - 1) * kCopyBlocks : kNone, (stage + kStages - 1) % kStages);
            if (!more) left--;
            piece += kCopyBlocks;
            stage = (stage + 1) % kStages;
            done++;
        }
        atomicMin(&least, done);
        __syncwarp();
        if (lane == 0) atomicAdd(const_cast<uint32_t*>(&finished), 1);
    } else if (lane == 0) {
        while (finished < kCopiers / 32) {
            lose_time(f.delay, seed);
            if (*static_cast<volatile uint32_t*>(state) & kClosed) {
                stop = 1;
                break;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned long long ended = f.log ? gpu_time() : 0;
        // Told once, at the end: a fence waits for all that is under way on its multiprocessor, reads over the link included.
        __threadfence();
        atomicAdd(state, least - kTaken);
        Span* span = width > 0 && least > 0 ? take_span(f.log) : nullptr;
        if (span) {
            uint32_t bytes = 0;
            for (uint32_t i = 0, piece = blockIdx.x; i < least; i++, piece += kCopyBlocks) {
                bytes += min(kPieceBytes, f.bytes - (piece < each ? piece : piece - each) * kPieceBytes);
            }
            *span = Span{begun, ended, chosen[0], bytes, 0, request};
        }
    }
}
