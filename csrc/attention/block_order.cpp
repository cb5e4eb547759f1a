// SPDX-License-Identifier: Apache-2.0
#include "block_order.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace relay {
namespace {

constexpr int32_t kNullBlock = 0;

// Up to the first null block from some block on, which nobody shares.
int end_of(const BlockOrder::Blocks& blocks, int from) {
  return int(std::find(blocks.begin() + from, blocks.end(), kNullBlock) - blocks.begin());
}

}  // namespace

void BlockOrder::begin(int row, const Blocks& blocks) {
  if (row >= int(rows_.size())) rows_.resize(row + 1);
  rows_[row] = {blocks, end_of(blocks, 0)};
  sort_in(row);
}

void BlockOrder::append(int row, const Blocks& blocks) {
  Row& own = rows_.at(row);
  const int before = int(own.blocks.size());
  own.blocks.insert(own.blocks.end(), blocks.begin(), blocks.end());
  const auto place = place_of(row);
  if (own.end < before || place == sorted_.end()) return;
  const int end = end_of(own.blocks, before);
  // one that others go on from may go on as they do
  const auto next = place + 1;
  const bool moves = next != sorted_.end() && next->common == before;
  if (moves) this->end(row);
  own.end = end;
  if (moves) sort_in(row);
}

void BlockOrder::end(int row) {
  const auto place = place_of(row);
  if (place == sorted_.end()) return;
  const auto next = place + 1;
  if (next != sorted_.end()) next->common = std::min(next->common, place->common);
  sorted_.erase(place);
}

const BlockOrder::Blocks& BlockOrder::blocks(int64_t row) const {
  static const Blocks none;
  return row < 0 ? none : rows_.at(size_t(row)).blocks;
}

// Has no two neighbours begin alike for longer than both may share: who may share less than it has
// in common with others goes before all of those that begin with as much as it may share.
void BlockOrder::shorten(std::vector<Place>& sharing, std::span<const int64_t> limits) {
  std::vector<int> shorter;
  for (size_t i = 0; i < sharing.size(); ++i) {
    const int next = i + 1 < sharing.size() ? sharing[i + 1].common : 0;
    if (limits[sharing[i].row] < std::max(sharing[i].common, next))
      shorter.push_back(sharing[i].row);
  }
  std::stable_sort(shorter.begin(), shorter.end(),
                   [&](int one, int other) { return limits[one] > limits[other]; });
  for (const int request : shorter) {
    const int limit = int(limits[request]);
    auto place = std::find_if(sharing.begin(), sharing.end(),
                              [&](const Place& each) { return each.row == request; });
    auto first = place;
    while (first->common >= limit) --first;  // nothing is before the first, which has 0 in common
    if (const auto next = place + 1; next != sharing.end())
      next->common = std::min(next->common, first == place ? limit : place->common);
    if (first == place) continue;
    std::rotate(first, place, place + 1);
    first->common = std::exchange((first + 1)->common, limit);
  }
}

BlockOrder::Forest BlockOrder::forest(std::span<const int64_t> rows,
                                      std::span<const int64_t> limits) {
  Forest found;
  std::vector<int> request_of(rows_.size(), -1);
  for (size_t request = 0; request < rows.size(); ++request) {
    if (limits[request] <= 0) continue;
    request_of.at(size_t(rows[request])) = int(request);
    found.has_nulls |= rows_[rows[request]].end == 0;
  }
  std::vector<Place> sharing;  // those of the batch
  int common = 0;
  for (const Place& place : sorted_) {
    common = sharing.empty() ? 0 : std::min(common, place.common);
    if (request_of[place.row] < 0) continue;
    sharing.push_back({request_of[place.row], common});
    common = std::numeric_limits<int>::max();
  }
  shorten(sharing, limits);
  std::vector<bool> is_in(rows.size(), false);
  for (const Place& place : sharing) {
    found.order.push_back(place.row);
    is_in[place.row] = true;
  }
  for (size_t request = 0; request < rows.size(); ++request)
    if (!is_in[request]) found.order.push_back(int(request));

  // every run of requests that begin alike: open while those that come have as much in common
  sharing.push_back({-1, 0});
  std::vector<Node> open{{0, 0, 0, 0, 0}};
  for (int place = 1; place < int(sharing.size()); ++place) {
    const int length = sharing[place].common;
    int first = place - 1;
    while (length < open.back().end) {
      Node node = open.back();
      open.pop_back();
      first = node.first;
      node.last = place;
      node.begin = std::max(open.back().end, length);
      node.request = found.order[first];
      found.nodes.push_back(node);
    }
    if (length > open.back().end) open.push_back({first, 0, 0, length, 0});
  }
  std::sort(found.nodes.begin(), found.nodes.end(), [](const Node& one, const Node& other) {
    return std::pair(one.first, one.end) < std::pair(other.first, other.end);
  });
  return found;
}

// Blocks with which two rows begin, of which so many are known to be the same.
int BlockOrder::common_of(const Row& one, const Row& other, int known) const {
  const int size = std::min(one.end, other.end);
  const int32_t *a = one.blocks.data(), *b = other.blocks.data();
  for (const int step : {256, 16, 1})
    while (known + step <= size &&
           std::memcmp(a + known, b + known, size_t(step) * sizeof(int32_t)) == 0)
      known += step;
  return known;
}

void BlockOrder::sort_in(int row) {
  const Row& own = rows_[row];
  size_t first = 0, last = sorted_.size();
  int before = 0, after = 0;  // blocks in common with the rows around what is left
  while (first < last) {
    const size_t middle = (first + last) / 2;
    const Row& other = rows_[sorted_[middle].row];
    const int common = common_of(own, other, std::min(before, after));
    const bool is_less =
        common < other.end && (common == own.end || own.blocks[common] < other.blocks[common]);
    if (is_less) {
      last = middle;
      after = common;
    } else {
      first = middle + 1;
      before = common;
    }
  }
  sorted_.insert(sorted_.begin() + first, {row, before});
  if (first + 1 < sorted_.size()) sorted_[first + 1].common = after;
}

std::vector<BlockOrder::Place>::iterator BlockOrder::place_of(int row) {
  return std::find_if(sorted_.begin(), sorted_.end(),
                      [&](const Place& each) { return each.row == row; });
}

}  // namespace relay
