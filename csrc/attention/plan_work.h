// SPDX-License-Identifier: Apache-2.0
// Who computes what of a step: row blocks and their spans, cut by cost into what threads take.
// None of these cuts is one of a sum.
#pragma once

#include <vector>

#include "problem.h"

namespace relay {

struct SpanCost {  // for one kv head, in nanoseconds
  double start;    // whatever its tokens
  double token;    // per token, of reading it
  double product;  // per token, of its keys alone, or of its values alone
  double weight;   // per token, of its weights alone
};

struct WorkToPlan {
  const Entry* entries;
  const Span* spans;
  const SpanCost* span_costs;
  const RowBlock* row_blocks;
  int num_row_blocks;
  double merge_ns;    // of a row's state, for one kv head
  double share_ns;    // what each thread would take if all could be divided evenly and for nothing
  double largest_ns;  // of an item, as far as segments can be given to several
  double good_ns;     // for all threads; segments are divided where they would need more
  int group_size, num_kv_heads, dim_groups, num_threads;
  bool heads_first;  // as in Plan
  bool may_divide;   // spans have whole tiles of tokens, but for the last
};

// Of each kind, the most expensive first.
struct WorkList {
  std::vector<WorkItem> items;
  std::vector<Division> divisions;
  std::vector<ScoreItem> score_items;
  std::vector<WeightItem> weight_items;
  std::vector<ValueItem> value_items;
  std::vector<Merge> merges;
  int num_partial_entries = 0, num_scores = 0;
  double makespan_ns = 0;  // what the threads need for it, as far as costs tell
};

// What keeps the threads busy, with as little divided as that takes.
WorkList plan_work(const WorkToPlan&);

}  // namespace relay
