// Records that a branch of the graph brings ahead of the layer that may use them (ahead.cu), into memory beside the slots,
// while the other branch computes. A layer's `resolve` is over before the branch's kernel behind that layer starts; the other
// way round nothing is ordered, and neither waits for the other to start: the branch's kernel may run much later than
// it was meant to. A word for each of its blocks is all that tells them apart.
//
// `resolve` of a layer opens the words for the next layer's guesses and closes them when that layer comes. A block takes its
// word only if it finds it open, copies until it is done or finds it closed, and gives it back with how far it came.
// `resolve` waits for a word that is taken: as long as a block needs for what it has under way.
#pragma once
#include <cstdint>

// No record, no slot.
constexpr uint32_t kNone = 0xffffffffu;
// So few blocks fill the link.
constexpr uint32_t kCopyBlocks = 4, kMostGuesses = 2;
// Threads of a block that copy 16 bytes kLoads times in a piece, and a warp that listens.
constexpr uint32_t kCopiers = 256, kLoads = 4, kCopyThreads = kCopiers + 32;
constexpr uint32_t kPieceBytes = 16 * kCopiers * kLoads;
// Pieces of a block in shared memory; all but one are under way.
constexpr uint32_t kStages = 4;
// A block's word: taken; closed; whether it was taken since it was opened; ordinal of the layer that opened it; how many
// pieces the block has copied.
constexpr uint32_t kTaken = 1u << 31, kClosed = 1u << 30, kSeen = 1u << 29, kOrdinalShift = 16, kCount = 0xffff;
constexpr uint32_t kMostOrdinal = (kSeen >> kOrdinalShift) - 1;

struct Chosen;

struct Ahead {
    uint32_t state[kCopyBlocks];        // block b has every kCopyBlocks-th piece, from b on
    // By the parity of the layer that is guessed, since the layer before may still be reading its own:
    uint32_t record[2][kMostGuesses];   // likeliest first, in no slot when they were chosen; kNone: no more
    uint32_t width[2];                  // how many of them are brought
    Chosen* chosen;                     // [layers] for the branch that learns from it (correlate.cu); else null
    uint64_t staging[2][kMostGuesses];  // addresses for them
};

// What became of a layer's guesses.
struct Foresight {
    unsigned long long guessed;      // records that were guessed
    unsigned long long right;        // of them, those that the layer missed
    unsigned long long brought;      // records of which anything was brought
    unsigned long long used;         // of them, those that the layer missed
    unsigned long long saved_bytes;  // that were there when the layer missed them
    unsigned long long bytes;        // that were brought
    uint32_t worth;                  // decaying share of the likeliest guesses that were right, in 2^-16
    uint32_t unused;
};
// As src/backend/cuda/ahead.rs counts them.
static_assert(sizeof(Ahead) == 80 && sizeof(Foresight) == 56, "mirrored structs");

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
    return v;
}

// What a layer finds of its guesses.
struct Arrived {
    uint32_t record[kMostGuesses], ready[kMostGuesses];  // bytes from the record's beginning
};

// For `layer`, whose words are closed and were `word` (of block `lane`) before. Nothing where the step before was of another
// layer than the one before: steps of several tokens may take turns, and tokens may be given up. One warp.
__device__ __forceinline__ void find_arrived(const Ahead& a, uint32_t layer, uint32_t record_bytes, uint32_t word,
                                             uint32_t lane, Arrived& found) {
    uint32_t there = kNone;
    bool seen = true;
    if (lane < kCopyBlocks) {
        while (word & kTaken) word = load_acquire(&a.state[lane]);
        __threadfence();  // what was copied is there for the kernels behind this one, too
        seen = (word & kSeen) && (word >> kOrdinalShift & kMostOrdinal) + 1 == layer;
        there = (word & kCount) * kCopyBlocks + lane;
    }
    seen = __all_sync(0xffffffffu, seen || lane != 0);
    const uint32_t pieces = __reduce_min_sync(0xffffffffu, there);
    if (lane < kMostGuesses) {
        const uint32_t parity = layer % 2, each = (record_bytes + kPieceBytes - 1) / kPieceBytes;
        const uint32_t width = seen ? a.width[parity] : 0;
        const uint32_t mine = lane < width && pieces > lane * each ? min(pieces - lane * each, each) : 0;
        found.record[lane] = seen ? a.record[parity][lane] : kNone;
        found.ready[lane] = min(mine * kPieceBytes, record_bytes);
    }
}
