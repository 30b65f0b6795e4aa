// Branch and bound: whether buffers can be placed in one arena of a given capacity.
//
// Of all placements below the capacity, look at one with the least sum of offsets: in it, every buffer lies at 0 or on
// another one. So buffers are placed from below. A buffer's *natural* offset is on top of everything placed that it
// meets; either it lies there, or on something that is not placed yet. Branching decides that for one buffer at a time:
// first it is placed; if that fails, it is held up until something is placed that it will lie on.
//
// After each decision, lower bounds of the offsets are raised for as long as one follows from others (propagate), and
// the search turns back where, in some section of time, the buffers left cannot all end below the capacity. Placing a
// buffer may leave parts that no longer meet, and these are solved one after the other: if one is impossible, nothing
// that the others do can help.
//
// Working in sections, placing from below, and solving parts apart are ideas of Moffitt, "MiniMalloc: A Lightweight
// Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023), which branches on the buffer with the
// globally lowest offset. Here any buffer with nothing to come below may be decided, so that a search can stay where
// memory is scarce; which section that is, one of four rules tells.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace {

using Bytes = std::int64_t;
constexpr Bytes kNever = std::numeric_limits<Bytes>::max() / 4;
constexpr double kLittle = 65536;

// A buffer that is not placed yet. It is held up while lowest > natural: something has to come below it first.
struct Item {
  int id;
  Bytes natural;  // above everything placed so far that it meets
  Bytes lowest;   // no solution from here has it lower
};

// Items that no time separates, one of them chosen, and what is left once it is placed.
struct Frame {
  std::vector<Item> items;  // by begin
  int chosen = -1;
  bool placed = false;
  std::vector<Item> rest;
  std::vector<std::size_t> ends;  // of the parts that the rest falls into
  std::size_t part = 0;           // the next to solve
};

class Search {
 public:
  Search(int count, int sections, const int* begin, const int* end, const Bytes* size, const int* twin)
      : begin_(begin, begin + count),
        end_(end, end + count),
        twin_(twin, twin + count),
        rank_(count),
        position_(count, -1),
        size_(size, size + count),
        offset_(count, 0),
        first_(sections),
        second_(sections),
        owner_(sections),
        filled_(sections),
        load_(sections),
        bottom_(sections),
        alive_(sections),
        able_(sections),
        only_(sections),
        trouble_(sections),
        frames_(count + 1) {}

  void start(const int* rank, Bytes capacity, int rule) {
    rank_.assign(rank, rank + rank_.size());
    capacity_ = capacity;
    rule_ = rule;
    depth_ = 0;
    result_ = -1;
    std::fill(trouble_.begin(), trouble_.end(), 1.0);
    std::vector<Item> all;
    for (int id = 0; id < static_cast<int>(begin_.size()); ++id) all.push_back({id, 0, 0});
    std::stable_sort(all.begin(), all.end(), [&](const Item& a, const Item& b) { return begin_[a.id] < begin_[b.id]; });
    open(frames_[0], all.data(), all.data() + all.size());
  }

  // 1: everything is placed; 0: that is impossible; -1: not known after so many nodes or seconds.
  int run(std::int64_t nodes, double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    while (result_ < 0) {
      Frame& frame = frames_[depth_];
      if (frame.placed && frame.part < frame.ends.size()) {
        const std::size_t from = frame.part ? frame.ends[frame.part - 1] : 0;
        open(frames_[++depth_], frame.rest.data() + from, frame.rest.data() + frame.ends[frame.part]);
      } else if (frame.placed) {
        close(true);
      } else if (nodes <= 0 || Clock::now() >= deadline) {
        break;
      } else {
        --nodes;
        ++nodes_;
        if (frame.chosen >= 0) {
          // It cannot lie where it could, so that something has to come below it.
          Item& item = frame.items[frame.chosen];
          item.lowest = std::max(item.lowest, item.natural + 1);
        }
        if (propagate(frame.items)) {
          frame.chosen = choose(frame.items);
          place(frame);
        } else {
          close(false);
        }
      }
    }
    return result_;
  }

  std::int64_t nodes() const { return nodes_; }
  void offsets(Bytes* out) const { std::copy(offset_.begin(), offset_.end(), out); }

 private:
  static void open(Frame& frame, const Item* from, const Item* to) {
    frame.items.assign(from, to);
    frame.chosen = -1;
    frame.placed = false;
  }

  void close(bool solved) {
    if (depth_ == 0) {
      result_ = solved;
      return;
    }
    Frame& above = frames_[--depth_];
    if (solved)
      ++above.part;
    else
      above.placed = false;
  }

  bool covers(int id, int section) const { return begin_[id] <= section && section < end_[id]; }
  bool meet(int a, int b) const { return begin_[a] < end_[b] && begin_[b] < end_[a]; }

  // Raises what is lowest until nothing follows any more. False if the capacity does not suffice.
  bool propagate(std::vector<Item>& items) {
    low_ = begin_[items.front().id];
    high_ = low_;
    for (const Item& item : items) high_ = std::max(high_, end_[item.id]);
    for (int s = low_; s < high_; ++s) {
      load_[s] = 0;
      alive_[s] = 0;
    }
    for (const Item& item : items) {
      for (int s = begin_[item.id]; s < end_[item.id]; ++s) {
        load_[s] += size_[item.id];
        ++alive_[s];
      }
    }
    bool changed = true;
    while (changed) {
      changed = false;
      order_twins(items, changed);
      if (!find_support(items, changed) || !stack_up(items) || !find_bottoms(items, changed))
        return false;
    }
    return true;
  }

  // Buffers that are alike lie in the order of their numbers.
  void order_twins(std::vector<Item>& items, bool& changed) {
    for (int i = 0; i < static_cast<int>(items.size()); ++i) position_[items[i].id] = i;
    for (Item& item : items) {
      const int twin = twin_[item.id] < 0 ? -1 : position_[twin_[item.id]];
      if (twin < 0) continue;
      const Bytes top = items[twin].lowest + size_[item.id];
      if (top > item.lowest) {
        item.lowest = top;
        changed = true;
      }
    }
    for (const Item& item : items) position_[item.id] = -1;
  }

  // What is held up will lie on something that is not placed yet.
  bool find_support(std::vector<Item>& items, bool& changed) {
    bool any = false;
    for (const Item& item : items) any |= item.lowest > item.natural;
    if (!any) return true;
    for (int s = low_; s < high_; ++s) {
      first_[s] = second_[s] = kNever;
      owner_[s] = -1;
    }
    for (const Item& item : items) {
      const Bytes top = item.lowest + size_[item.id];
      for (int s = begin_[item.id]; s < end_[item.id]; ++s) {
        if (top < first_[s]) {
          second_[s] = first_[s];
          first_[s] = top;
          owner_[s] = item.id;
        } else if (top < second_[s]) {
          second_[s] = top;
        }
      }
    }
    for (Item& item : items) {
      if (item.lowest == item.natural) continue;
      Bytes support = kNever;
      for (int s = begin_[item.id]; s < end_[item.id]; ++s)
        support = std::min(support, owner_[s] == item.id ? second_[s] : first_[s]);
      if (support > item.lowest) {
        item.lowest = support;
        changed = true;
      }
      if (item.lowest + size_[item.id] > capacity_) return false;
    }
    return true;
  }

  // In every section, items one on the other, the lowest first: no solution has the last of them end lower.
  bool stack_up(const std::vector<Item>& items) {
    order_.clear();
    for (int i = 0; i < static_cast<int>(items.size()); ++i) order_.emplace_back(items[i].lowest, i);
    std::sort(order_.begin(), order_.end());
    for (int s = low_; s < high_; ++s) {
      filled_[s] = bottom_[s] = -1;
      able_[s] = 0;
    }
    for (const auto& [lowest, i] : order_) {
      const int id = items[i].id;
      for (int s = begin_[id]; s < end_[id]; ++s) {
        if (filled_[s] < 0) bottom_[s] = lowest;
        filled_[s] = std::max(filled_[s], lowest) + size_[id];
        if (filled_[s] > capacity_) {
          trouble_[s] += 1;
          return false;
        }
        if (lowest + load_[s] <= capacity_) {
          ++able_[s];
          only_[s] = i;
        }
      }
    }
    return true;
  }

  // The lowest item of a section has all others above it. Where only one is able to be that, they are.
  bool find_bottoms(std::vector<Item>& items, bool& changed) {
    for (int s = low_; s < high_; ++s) {
      if (alive_[s] == 0) continue;
      if (able_[s] == 0) {
        trouble_[s] += 1;
        return false;
      }
      if (able_[s] > 1 || alive_[s] == 1) continue;
      const int bottom = items[only_[s]].id;
      const Bytes top = items[only_[s]].lowest + size_[bottom];
      for (Item& item : items) {
        if (item.id != bottom && item.lowest < top && covers(item.id, s)) {
          item.lowest = top;
          changed = true;
        }
      }
    }
    return true;
  }

  // The section to decide about.
  int section() const {
    int best = -1;
    double least = 0;
    for (int s = low_; s < high_; ++s) {
      if (alive_[s] == 0) continue;
      double value = 0;
      if (rule_ == 0) {
        value = static_cast<double>(able_[s]) / alive_[s];
      } else if (rule_ == 1) {
        value = (static_cast<double>(capacity_ - filled_[s]) + kLittle) * able_[s] / trouble_[s];
      } else if (rule_ == 2) {
        value = able_[s] / trouble_[s];
      } else {
        value = static_cast<double>(bottom_[s]);
      }
      if (best < 0 || value < least) {
        least = value;
        best = s;
      }
    }
    return best;
  }

  // An item that is not held up, with nothing left that would fit below it.
  int choose(const std::vector<Item>& items) const {
    const int at = section();
    int best = -1;
    const auto better = [&](const Item& a, const Item& b) {
      return a.lowest != b.lowest ? a.lowest < b.lowest : rank_[a.id] < rank_[b.id];
    };
    for (int i = 0; i < static_cast<int>(items.size()); ++i) {
      const Item& item = items[i];
      if (covers(item.id, at) && item.lowest == item.natural && item.lowest + load_[at] <= capacity_ &&
          (best < 0 || better(item, items[best])))
        best = i;
    }
    // All of them may be held up: then by something else, which is found from any of them.
    for (int i = 0; best < 0; ++i)
      if (covers(items[i].id, at)) best = i;
    while (true) {
      int below = -1;
      Bytes least = items[best].lowest;
      for (int i = 0; i < static_cast<int>(items.size()); ++i) {
        const Bytes top = items[i].lowest + size_[items[i].id];
        if (i != best && meet(items[i].id, items[best].id) && (below < 0 ? top <= least : top < least)) {
          below = i;
          least = top;
        }
      }
      if (below < 0) return best;
      best = below;
    }
  }

  void place(Frame& frame) {
    const Item chosen = frame.items[frame.chosen];
    const Bytes top = chosen.natural + size_[chosen.id];
    frame.rest.clear();
    frame.ends.clear();
    frame.part = 0;
    frame.placed = true;
    offset_[chosen.id] = chosen.natural;
    int until = -1;
    for (const Item& old : frame.items) {
      if (old.id == chosen.id) continue;
      Item item = old;
      if (meet(item.id, chosen.id)) {
        item.natural = std::max(item.natural, top);
        item.lowest = std::max(item.lowest, top);
      }
      if (!frame.rest.empty() && begin_[item.id] >= until) frame.ends.push_back(frame.rest.size());
      until = std::max(until, end_[item.id]);
      frame.rest.push_back(item);
    }
    if (!frame.rest.empty()) frame.ends.push_back(frame.rest.size());
  }

  std::vector<int> begin_, end_, twin_, rank_, position_;
  std::vector<Bytes> size_, offset_;
  // By section: the two lowest tops and whose the first is; where a stack of all items ends and begins; bytes and
  // number of items; how many of them may be the lowest, and the last such; how often it was what failed.
  std::vector<Bytes> first_, second_;
  std::vector<int> owner_;
  std::vector<Bytes> filled_, load_, bottom_;
  std::vector<int> alive_, able_, only_;
  std::vector<double> trouble_;
  std::vector<std::pair<Bytes, int>> order_;
  std::vector<Frame> frames_;
  Bytes capacity_ = 0;
  int rule_ = 0;
  std::size_t depth_ = 0;
  std::int64_t nodes_ = 0;
  int low_ = 0, high_ = 0, result_ = -1;
};

}  // namespace

extern "C" {

void* fxwrap_search_new(int count, int sections, const int* begin, const int* end, const Bytes* size, const int* twin) {
  return new Search(count, sections, begin, end, size, twin);
}

void fxwrap_search_delete(void* search) { delete static_cast<Search*>(search); }

void fxwrap_search_start(void* search, const int* rank, Bytes capacity, int rule) {
  static_cast<Search*>(search)->start(rank, capacity, rule);
}

int fxwrap_search_run(void* search, std::int64_t nodes, double seconds) {
  return static_cast<Search*>(search)->run(nodes, seconds);
}

std::int64_t fxwrap_search_nodes(void* search) { return static_cast<Search*>(search)->nodes(); }

void fxwrap_search_offsets(void* search, Bytes* out) { static_cast<Search*>(search)->offsets(out); }
}
