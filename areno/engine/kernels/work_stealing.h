// Distributes work among all threads by work stealing: each thread processes an equal part in order, and a thread that has
// finished takes pieces from the end of another thread's part. With equal parts alone, all threads would wait for the slowest
// core.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace work_stealing {

// Splits the items [begin, end) into pieces of `most` items, but of `least` items near the end, where other threads take them.
struct Part {
  int64_t begin, end, most, least;

  int64_t large() const { return std::max<int64_t>(0, (end - begin) / most - 1); }
  int64_t pieces() const { return large() + (end - begin - large() * most + least - 1) / least; }
  int64_t start(int64_t piece) const {
    const int64_t larger = std::min(piece, large());
    return std::min(end, begin + larger * most + (piece - larger) * least);
  }
};

// Calls f(begin, end) for pieces that make up the items [0, items), from all threads.
template <typename F>
void for_each_piece(int64_t items, int64_t most, int64_t least, const F& f) {
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), (items + least - 1) / least);
  if (threads <= 1) return f(0, items);
  const auto part = [&](int64_t t) { return Part{items * t / threads, items * (t + 1) / threads, most, least}; };
  // One flag per piece; the flags of different parts are a multiple of 64 bytes apart to reduce false sharing. Other parts
  // have at most one item more than the first part, and so at most one piece more.
  const int64_t flags_per_part = (part(0).pieces() + 64) / 64 * 64;
  static thread_local std::vector<char> buffer;
  buffer.assign(flags_per_part * threads, 0);
  char* const flags = buffer.data();
  const auto take = [&](int64_t owner, int64_t piece) {
    if (__atomic_exchange_n(flags + owner * flags_per_part + piece, 1, __ATOMIC_RELAXED)) return false;
    f(part(owner).start(piece), part(owner).start(piece + 1));
    return true;
  };
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t mine = first; mine < last; ++mine) {
      for (int64_t piece = 0; piece < part(mine).pieces() && take(mine, piece); ++piece) {
      }
      for (int64_t other = (mine + 1) % threads; other != mine; other = (other + 1) % threads)
        for (int64_t piece = part(other).pieces() - 1; piece >= 0 && take(other, piece); --piece) {
        }
    }
  });
}

}  // namespace work_stealing
