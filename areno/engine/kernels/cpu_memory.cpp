// Allocator for PyTorch's large CPU tensors: one address range, best fit. It joins free neighboring blocks, and returns memory
// to the system only on request.
//
// To align a block, glibc requests more than the block needs, so a freed block rarely fits the next request of the same size;
// with glibc, the peak of a training process was twice as high (see cpu_memory.py). Returning each block to the system at once
// would cost a page fault for each 4 KiB of the next block. Built by library.py against c10: PyTorch's stable ABI has no
// allocators.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// Tensors smaller than this come from malloc.
constexpr size_t LARGE = 256 << 10;
// Blocks begin at a multiple of LINE. Without GAP, all blocks whose size is a power of two would begin at the same offset of a
// page, and a processor could mistake a load from one block for a load of what was just stored in another.
constexpr size_t LINE = 64, GAP = 3 * LINE;
// If less than this remains of a free block, the rest stays part of the allocated block.
constexpr size_t REST = 16 << 10;

class Arena {
 public:
  // Reserves addresses but no memory yet; false if the system refuses.
  bool open() {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t machine = page_ * static_cast<size_t>(sysconf(_SC_PHYS_PAGES));
    void* addresses = mmap(nullptr, 4 * machine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (addresses == MAP_FAILED) return false;
#ifdef MADV_HUGEPAGE
    madvise(addresses, 4 * machine, MADV_HUGEPAGE);  // one page fault per 2 MiB, if the system allows it
#endif
    begin_ = top_ = static_cast<char*>(addresses);
    end_ = begin_ + 4 * machine;
    return true;
  }

  bool has(const void* address) const { return address >= begin_ && address < end_; }

  // A block of at least `bytes` bytes; nullptr if no addresses are left.
  void* allocate(size_t bytes) {
    const size_t size = (bytes + LINE - 1) / LINE * LINE + GAP;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto fit = by_size_.lower_bound({size, nullptr});
    if (fit == by_size_.end()) {
      if (!grow(size)) return nullptr;
      fit = by_size_.lower_bound({size, nullptr});
    }
    const auto [available, address] = *fit;
    remove(address, available);
    const size_t rest = available - size;
    if (rest >= REST) add(address + size, rest);
    used_[address] = rest >= REST ? size : available;
    return address;
  }

  void release(void* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = used_.find(static_cast<char*>(block));
    char* address = known->first;
    size_t size = known->second;
    used_.erase(known);
    const auto after = by_address_.lower_bound(address);
    if (after != by_address_.begin()) {
      const auto [neighbor, length] = *std::prev(after);
      if (neighbor + length == address) {
        remove(neighbor, length);
        address = neighbor;
        size += length;
      }
    }
    const auto next = by_address_.find(address + size);
    if (next != by_address_.end()) {
      const size_t length = next->second;
      remove(address + size, length);
      size += length;
    }
    add(address, size);
  }

  // Returns the whole pages of free blocks to the system.
  void release_free_pages() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [address, size] : by_address_) {
      const auto [first, length] = pages(address, size);
      if (length) madvise(first, length, MADV_DONTNEED);
    }
  }

  // Resident size in bytes of the free blocks.
  size_t resident_free_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t resident = 0;
    std::vector<unsigned char> present;
    for (const auto& [address, size] : by_address_) {
      const auto [first, length] = pages(address, size);
      present.resize(length / page_);
      if (length == 0 || mincore(first, length, present.data()) != 0) continue;
      for (const unsigned char page : present) resident += (page & 1) * page_;
    }
    return resident;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  // Extends the last free block to the needed size; the addresses behind it have never been used.
  bool grow(size_t size) {
    char* address = top_;
    size_t free_at_end = 0;
    if (!by_address_.empty()) {
      const auto [last, length] = *std::prev(by_address_.end());
      if (last + length == top_) {
        address = last;
        free_at_end = length;
      }
    }
    if (static_cast<size_t>(end_ - address) < size) return false;
    if (free_at_end) remove(address, free_at_end);
    top_ = address + size;
    add(address, size);
    return true;
  }

  std::pair<char*, size_t> pages(char* address, size_t size) const {
    const uintptr_t first = (reinterpret_cast<uintptr_t>(address) + page_ - 1) / page_ * page_;
    const uintptr_t last = reinterpret_cast<uintptr_t>(address + size) / page_ * page_;
    return {reinterpret_cast<char*>(first), last > first ? last - first : 0};
  }

  void add(char* address, size_t size) {
    by_address_[address] = size;
    by_size_.insert({size, address});
  }

  void remove(char* address, size_t size) {
    by_address_.erase(address);
    by_size_.erase({size, address});
  }

  size_t page_ = 4096;
  char *begin_ = nullptr, *top_ = nullptr, *end_ = nullptr;
  std::map<char*, size_t> by_address_;
  std::set<std::pair<size_t, char*>> by_size_;
  std::unordered_map<char*, size_t> used_;
  std::mutex mutex_;
};

// Never destroyed: tensors may outlive all other objects of the process.
Arena& arena() {
  static Arena* const one = new Arena;
  return *one;
}

void release(void* block) {
  if (arena().has(block)) {
    c10::profiledCPUMemoryReporter().Delete(block);
    arena().release(block);
  } else {
    c10::GetDefaultCPUAllocator()->raw_deleter()(block);
  }
}

struct LargeBlocks final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes >= LARGE ? arena().allocate(bytes) : nullptr;
    if (block == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

// Makes PyTorch take new tensors from this allocator; existing tensors stay where they are. Returns 0 if that is impossible.
int areno_memory_open() {
  if (!arena().open()) return 0;
  // fork takes the lock first: if another thread held it, it would stay locked in the child.
  pthread_atfork([] { arena().mutex().lock(); }, [] { arena().mutex().unlock(); }, [] { arena().mutex().unlock(); });
  static LargeBlocks* const blocks = new LargeBlocks;
  c10::SetCPUAllocator(blocks, 1);
  return 1;
}

void areno_memory_release_unused() { arena().release_free_pages(); }

size_t areno_memory_unused_bytes() { return arena().resident_free_bytes(); }
}
