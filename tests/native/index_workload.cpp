// SPDX-License-Identifier: Apache-2.0
// A random workload for sanitizers (scripts/sanitize.py): builds indexes of odd sizes with every
// kernel, searches them from several threads at once, and checks what scripts in Python cannot see.
// Arrays are exactly as long as they have to be. Usage: index_workload CASES SEARCH_THREADS
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "index/block_ranges.h"
#include "index/encode_keys.h"
#include "index/kernels.h"
#include "index/query_code.h"
#include "storage/crc32c.h"
#include "storage/page_guard.h"

using namespace relay::index;

namespace {

using Random = std::mt19937_64;

int64_t pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
float normal(Random& random) { return std::normal_distribution<float>()(random); }

void require(bool condition, const char* what, int number) {
  if (condition) return;
  std::fprintf(stderr, "case %d: %s\n", number, what);
  std::exit(1);
}

// Keys of one of the three element types, their codes, and blocks of these.
struct Keys {
  int32_t size, stride;
  int64_t count;
  ElementType type;
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  std::vector<float> mean, step;
  std::vector<uint8_t> codes, outside, blocks, upper, lower;
  std::vector<int32_t> always;
  float longest = 0, longest_error = 0;

  Keys(Random& random, const IndexKernels& kernels) {
    size = static_cast<int32_t>(pick(random, 1, 256));
    stride = (size + 63) / 64 * 64;
    count = pick(random, 0, 3) ? pick(random, 1, 400) : pick(random, 1, 3000);
    type = static_cast<ElementType>(pick(random, 0, 2));
    const float magnitude = type == ElementType::kFloat32
                                ? std::pow(10.f, static_cast<float>(pick(random, -30, 12)))
                                : 1;
    const auto total = static_cast<size_t>(count * size);
    const int64_t distinct = pick(random, 0, 2) ? count : (count + 9) / 10;
    floats.resize(total);
    for (int64_t i = 0; i < count; ++i)
      for (int32_t d = 0; d < size; ++d)
        floats[i * size + d] = i < distinct ? magnitude * normal(random)
                                            : floats[pick(random, 0, distinct - 1) * size + d];
    for (int64_t i = pick(random, 0, 3); i > 0; --i)
      floats[pick(random, 0, static_cast<int64_t>(total) - 1)] *= 1000;
    if (type != ElementType::kFloat32) {
      halves.resize(total);
      for (size_t i = 0; i < total; ++i) {
        uint32_t bits;
        std::memcpy(&bits, &floats[i], 4);
        // bfloat16 by cutting; as float16 the same bits are other numbers, of exponents up to 2^14
        halves[i] = static_cast<uint16_t>(bits >> 16) & 0xbbff;
      }
    }
    mean.resize(size);
    for (float& m : mean) m = pick(random, 0, 1) ? magnitude * normal(random) : 0.f;
    step.resize(size);
    for (float& s : step)
      s = magnitude * std::uniform_real_distribution<float>(0.01f, 0.06f)(random);
    codes.resize(count * stride);
    outside.resize(count);
    std::tie(longest, longest_error) = kernels.encode(rows(), mean.data(), step.data(), 0, count,
                                                      codes.data(), stride, outside.data(), 1);
    for (int64_t i = 0; i < count; ++i)
      if (outside[i] && always.size() < 64) always.push_back(static_cast<int32_t>(i));
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    blocks = lay_out(order);
    upper.resize(blocks.size() / 2);
    lower.resize(blocks.size() / 2);
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* const code = codes.data() + i * stride;
      write_upper_lane(code, stride, upper.data() + i / 16 * 8 * stride, i % 16);
      write_lower_row(code, stride, lower.data() + i * stride / 2);
    }
  }

  Rows rows() const {
    const void* data = type == ElementType::kFloat32 ? static_cast<const void*>(floats.data())
                                                     : static_cast<const void*>(halves.data());
    return {data, type, size, count};
  }
  Codes view() const {
    return {codes.data(), stride, size, count, mean.data(), step.data(), longest, longest_error};
  }
  std::vector<uint8_t> lay_out(const std::vector<int32_t>& order) const {
    std::vector<uint8_t> out((order.size() + 15) / 16 * 16 * stride, 128);
    for (size_t i = 0; i < order.size(); ++i)
      for (int32_t s = 0; s < stride && order[i] >= 0; ++s)
        out[i / 16 * 16 * stride + s / 4 * 64 + i % 16 * 4 + s % 4] =
            codes[static_cast<int64_t>(order[i]) * stride + s];
    return out;
  }
};

std::vector<float> random_queries(Random& random, const Keys& keys, int64_t count) {
  std::vector<float> queries(count * keys.size);
  const float magnitude = std::pow(10.f, static_cast<float>(pick(random, -30, 6)));
  for (float& q : queries) q = pick(random, 0, 9) ? magnitude * normal(random) : 0.f;
  return queries;
}

// No score of a key with a code is further from what the code says than `largest_error`.
void check_bound(const float* query, const Codes& codes, const Rows& keys, const uint8_t* outside,
                 int number) {
  std::vector<int8_t> code(codes.stride);
  QueryCode upper;
  const QueryCode form = encode_query(query, codes, code.data(), &upper);
  with_elements(keys, [&](const auto* rows) {
    for (int64_t i = 0; i < keys.num_rows; ++i) {
      if (outside[i]) continue;
      int64_t product = 0, upper_product = 0;
      for (int32_t d = 0; d < codes.stride; ++d) {
        const int64_t element = codes.data[i * codes.stride + d];
        product += element * code[d];
        upper_product += (element >> 4) * code[d];
      }
      long double exact = 0;
      for (int32_t d = 0; d < keys.size; ++d)
        exact += static_cast<long double>(query[d]) * relay::to_float(rows[i * keys.size + d]);
      const double guess = form.offset + form.unit * static_cast<double>(product);
      const float score = dot_row(query, rows + i * keys.size, keys.size);
      require(std::fabs(guess - static_cast<double>(exact)) <= form.largest_error,
              "a score is further from its code than largest_error", number);
      require(!std::isfinite(score) || std::fabs(guess - score) <= form.largest_error,
              "a float score is further from its code than largest_error", number);
      const double by_half = upper.offset + upper.unit * static_cast<double>(upper_product);
      require(std::fabs(by_half - static_cast<double>(exact)) <= upper.largest_error,
              "a score is further from its upper half than largest_error", number);
    }
  });
}

// The keys whose rounding, or whose query's rounding, adds up the most.
void check_worst_keys(const float* query, const Keys& like, const IndexKernels& kernels,
                      int number) {
  const int32_t size = like.size;
  std::vector<int8_t> code(like.stride);
  const QueryCode form = encode_query(query, like.view(), code.data());
  for (const float steps : {0.49999f, 126.49999f, 127.f}) {
    std::vector<float> key(size);
    for (int32_t d = 0; d < size; ++d) {
      const double scaled = double{query[d]} * like.step[d];
      const double turn = steps == 127.f ? scaled - form.unit * code[d] : scaled;
      key[d] = like.mean[d] + like.step[d] * (turn < 0 ? -steps : steps);
    }
    const Rows row{key.data(), ElementType::kFloat32, size, 1};
    std::vector<uint8_t> codes(like.stride);
    uint8_t outside;
    const auto [longest, longest_error] = kernels.encode(row, like.mean.data(), like.step.data(), 0,
                                                         1, codes.data(), like.stride, &outside, 1);
    check_bound(query,
                {codes.data(), like.stride, size, 1, like.mean.data(), like.step.data(), longest,
                 longest_error},
                row, &outside, number);
  }
}

struct Index {
  const IndexKernels& kernels;
  Keys keys;
  std::vector<int32_t> graph;
  int32_t graph_stride = 0;
  // lists by position modulo their number
  std::vector<uint8_t> centres, list_blocks;
  std::vector<int64_t> starts;
  std::vector<int32_t> counts, ids;
  // codes of one key for each block of tokens, or the largest and the smallest of each dimension
  int32_t block_tokens = 0;
  std::vector<uint8_t> members, largest, smallest;

  Index(Random& random, const IndexKernels& kernels, int build_threads, int number)
      : kernels(kernels), keys(random, kernels) {
    const int64_t num_queries = pick(random, 0, 150);
    const auto k = static_cast<int32_t>(pick(random, 1, 130));
    const std::vector<float> queries = random_queries(random, keys, num_queries);
    std::vector<int32_t> nearest(num_queries * k, -7);
    kernels.nearest(keys.view(), keys.rows(), queries.data(), num_queries, k, keys.always,
                    nearest.data(), build_threads);
    for (const int32_t id : nearest) require(id >= -1 && id < keys.count, "nearest", number);

    const GraphBuildOptions options{static_cast<int32_t>(pick(random, 0, 30)),
                                    static_cast<int32_t>(pick(random, 0, 8)),
                                    static_cast<int32_t>(pick(random, 1, 80)),
                                    static_cast<int32_t>(pick(random, 1, 30)),
                                    static_cast<int32_t>(pick(random, 1, 16)),
                                    static_cast<float>(pick(random, 0, 2)) / 2,
                                    build_threads};
    graph_stride = (3 + options.projection_degree + 2 * options.supply_degree + 15) / 16 * 16;
    graph.assign(keys.count * graph_stride, 0);
    const auto entry = static_cast<int32_t>(pick(random, 0, keys.count - 1));
    kernels.build_graph(keys.view(), keys.rows(), {graph.data(), graph_stride}, options,
                        nearest.data(), num_queries, k, &entry, 1);
    require(count_reachable(entry) == keys.count, "a key cannot be reached", number);
    fill_lists(random);
    fill_token_blocks(random);
  }

  int64_t count_reachable(int32_t entry) const {
    std::vector<char> seen(keys.count, 0);
    std::vector<int32_t> stack{entry};
    seen[entry] = 1;
    int64_t reached = 0;
    while (!stack.empty()) {
      const int32_t* row = graph.data() + static_cast<int64_t>(stack.back()) * graph_stride;
      stack.pop_back();
      ++reached;
      for (int32_t i = 1; i <= row[0]; ++i)
        if (!seen[row[i]]) {
          seen[row[i]] = 1;
          stack.push_back(row[i]);
        }
    }
    return reached;
  }

  void fill_lists(Random& random) {
    const int64_t num_lists = pick(random, 1, std::min<int64_t>(keys.count, 60));
    std::vector<int32_t> firsts;
    for (int64_t list = 0; list < num_lists; ++list) {
      starts.push_back(static_cast<int64_t>(ids.size() / 16));
      const size_t begin = ids.size();
      for (int64_t i = list; i < keys.count; i += num_lists)
        if (std::find(keys.always.begin(), keys.always.end(), i) == keys.always.end())
          ids.push_back(static_cast<int32_t>(i));
      if (ids.size() == begin) {  // all of them have no code
        starts.pop_back();
        continue;
      }
      counts.push_back(static_cast<int32_t>(ids.size() - begin));
      ids.resize((ids.size() + 15) / 16 * 16, -1);
      firsts.push_back(static_cast<int32_t>(list));
    }
    ids.shrink_to_fit();
    list_blocks = keys.lay_out(ids);
    centres = keys.lay_out(firsts);
  }

  void fill_token_blocks(Random& random) {
    block_tokens = 16 * static_cast<int32_t>(pick(random, 1, 5));
    const int64_t count = (keys.count + block_tokens - 1) / block_tokens;
    const int64_t size = (count + 15) / 16 * 16 * keys.stride;
    largest.assign(size, 0);
    smallest.assign(size, 255);
    std::vector<int32_t> firsts;
    for (int64_t i = 0; i < count; ++i) {
      firsts.push_back(static_cast<int32_t>(i * block_tokens));
      for (int64_t key = i * block_tokens; key < std::min(keys.count, (i + 1) * block_tokens);
           ++key)
        for (int32_t d = 0; d < keys.stride; ++d) {
          const int64_t at = i / 16 * 16 * keys.stride + d / 4 * 64 + i % 16 * 4 + d % 4;
          const uint8_t code = keys.codes[key * keys.stride + d];
          largest[at] = std::max(largest[at], code);
          smallest[at] = std::min(smallest[at], code);
        }
    }
    members = keys.lay_out(firsts);
  }

  void search(Random& random, int number) const {
    const auto g = static_cast<int32_t>(pick(random, 0, 20));
    const std::vector<float> queries = random_queries(random, keys, g);
    std::vector<float> window(g);
    for (float& w : window) w = pick(random, 0, 2) ? normal(random) : -INFINITY;
    std::vector<int32_t> entries(pick(random, 1, 40));
    for (int32_t& id : entries) id = static_cast<int32_t>(pick(random, 0, keys.count - 1));

    SearchRequest request{};
    request.queries = queries.data();
    request.num_queries = g;
    request.k = pick(random, 0, 1) ? static_cast<int32_t>(pick(random, 1, keys.count)) : 0;
    request.range = std::pow(10.f, static_cast<float>(pick(random, -8, 20)));
    request.width = static_cast<int32_t>(pick(random, 1, 2 * keys.count));
    request.window_max = pick(random, 0, 1) ? window.data() : nullptr;
    request.prefix_len = pick(random, 0, 1) ? keys.count : pick(random, 0, keys.count);
    request.begin = pick(random, 0, 2) ? 0 : pick(random, 0, request.prefix_len);
    request.entries = entries.data();
    request.num_entries = static_cast<int32_t>(entries.size());
    request.max_dropped_mass = NAN;
    request.always = keys.always.data();
    request.num_always = static_cast<int32_t>(keys.always.size());

    SearchOutcome outcome;
    kernels.search_graph(keys.view(), keys.rows(),
                         {const_cast<int32_t*>(graph.data()), graph_stride}, request, outcome);
    check(outcome, request, number);
    outcome = {};
    kernels.search_lists(keys.view(),
                         {centres.data(), static_cast<int32_t>(counts.size()), list_blocks.data(),
                          starts.data(), counts.data(), ids.data()},
                         keys.rows(), request, outcome);
    check(outcome, request, number);
    const bool bounded = pick(random, 0, 1);
    if (bounded && pick(random, 0, 1)) request.width = 0;  // exact
    outcome = {};
    kernels.search_blocks(keys.view(),
                          {keys.blocks.data(), bounded ? largest.data() : members.data(),
                           bounded ? smallest.data() : nullptr, block_tokens},
                          keys.rows(), request, outcome);
    check(outcome, request, number);
    if (request.width == 0) check_same_as_scan(outcome, request, number);
    outcome = {};
    request.scale = 0.1f;
    const auto asked = pick(random, 0, 3);
    if (asked == 1) request.max_dropped_mass = pick(random, 0, 1) ? 2.f : 0.01f;
    if (asked == 2) {
      request.k = 0;
      request.weighs_unread = true;
    }
    scan(request, outcome);
    check(outcome, request, number);
    attend(random, outcome);
  }

  void scan(const SearchRequest& request, SearchOutcome& outcome) const {
    std::vector<BlockRange> ranges;
    append_ranges(request.begin, request.prefix_len, keys.always, ranges);
    kernels.scan(keys.view(), {keys.upper.data(), keys.lower.data()}, keys.rows(), ranges, request,
                 outcome);
  }

  void check_same_as_scan(const SearchOutcome& outcome, const SearchRequest& request,
                          int number) const {
    SearchOutcome expected;
    scan(request, expected);
    const auto same = [](const Found& a, const Found& b) {
      return a.id == b.id && a.score == b.score;
    };
    for (size_t q = 0; q < outcome.found.size(); ++q) {
      const auto &found = outcome.found[q], &other = expected.found[q];
      require(std::equal(found.begin(), found.end(), other.begin(), other.end(), same),
              "blocks and a scan answer differently", number);
    }
  }

  void check(const SearchOutcome& outcome, const SearchRequest& request, int number) const {
    require(static_cast<int32_t>(outcome.found.size()) == request.num_queries, "answers", number);
    for (const auto& found : outcome.found)
      for (size_t i = 0; i < found.size(); ++i) {
        require(found[i].id >= request.begin && found[i].id < request.prefix_len,
                "a key that does not count", number);
        require(i == 0 || request.weighs_unread || found[i - 1].score >= found[i].score,
                "not best first", number);
      }
  }

  void attend(Random& random, const SearchOutcome& outcome) const {
    const auto size = static_cast<int32_t>(pick(random, 1, 70));
    const std::vector<float> values(keys.count * size, 1.f);
    const int64_t num_means = (keys.count + kMeanKeys - 1) / kMeanKeys;
    const size_t num_queries = outcome.found.size();
    std::vector<float> out(num_queries * size), lses(num_queries), means(num_means * size);
    const Rows rows{values.data(), ElementType::kFloat32, size, keys.count};
    kernels.mean_rows(rows, means.data(), 1);
    kernels.attend_found(
        outcome.found, rows, outcome.unread.empty() ? nullptr : outcome.unread.data(),
        {means.data(), ElementType::kFloat32, size, num_means}, 0.1f, out.data(), lses.data());
  }
};

void checksums(Random& random, int number) {
  std::vector<uint8_t> bytes(pick(random, 0, 5000));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const uint32_t expected = relay::crc32c_portable(0, bytes.data(), bytes.size());
  for (int i = 0; i < relay::kNumCrc32cKernels; ++i)
    if (relay::kCrc32cKernels[i].runs_here())
      require(relay::kCrc32cKernels[i].run(0, bytes.data(), bytes.size()) == expected, "crc32c",
              number);
  const relay::Pages pages{bytes.data(), bytes.size(), static_cast<size_t>(pick(random, 1, 700))};
  std::vector<uint32_t> sums(pages.count());
  relay::checksum_pages(pages, relay::crc32c(), sums.data());
  require(relay::find_damage(pages, relay::crc32c(), sums.data(), 0, pages.count(),
                             relay::Mapping::kNone)
                  .page == -1,
          "checksums of pages", number);
  const relay::PageGuard guard(pages, sums.data(), relay::Mapping::kNone, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (size_t page = pages.count(); page-- > 0;) guard.verify(page);
    });
  for (std::thread& thread : threads) thread.join();
  guard.verify(0, pages.count());
}

}  // namespace

int main(int argc, char** argv) {
  const int num_cases = argc > 1 ? std::atoi(argv[1]) : 20;
  const int num_threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const int build_threads = argc > 3 ? std::atoi(argv[3]) : 1;
  for (int number = 0; number < num_cases; ++number) {
    Random random(number);
    for (const auto name : index_kernel_names()) {
      const Index index(random, index_kernels(name), build_threads, number);
      const std::vector<float> queries = random_queries(random, index.keys, 4);
      for (int q = 0; q < 4; ++q) {
        const float* query = queries.data() + q * index.keys.size;
        check_bound(query, index.keys.view(), index.keys.rows(), index.keys.outside.data(), number);
        check_worst_keys(query, index.keys, index.kernels, number);
      }
      std::vector<std::thread> threads;
      for (int t = 0; t < num_threads; ++t)
        threads.emplace_back([&index, number, t] {
          Random mine(1000 * number + t);
          for (int i = 0; i < 8; ++i) index.search(mine, number);
          checksums(mine, number);
        });
      for (std::thread& thread : threads) thread.join();
    }
  }
  std::printf("%d cases\n", num_cases);
}
