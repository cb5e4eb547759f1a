// SPDX-License-Identifier: Apache-2.0
// The KV blocks of one KV cache group's requests, and an order in which those that begin alike are
// neighbours. It is kept from step to step: a request that begins is sorted in, and what is said of
// the others stays true.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace relay {

class BlockOrder {
 public:
  using Blocks = std::vector<int32_t>;

  struct Node {
    int32_t first, last;  // of a run of the order
    int32_t begin, end;   // blocks that are read together
    int32_t request;      // whose blocks they are
  };

  // As vllm_relay.attention_backends.forest.Forest, in blocks instead of tokens.
  struct Forest {
    std::vector<int32_t> order;
    std::vector<Node> nodes;
    bool has_nulls = false;  // one that may share begins with a null block: nothing is said of it
  };

  // A request that has these blocks takes a free row.
  void begin(int row, const Blocks& blocks);
  // The request of a row has these blocks behind those it had.
  void append(int row, const Blocks& blocks);
  // A row is free again.
  void end(int row);
  // Of a row, none where it is negative. Throws std::out_of_range: nobody took such a row.
  const Blocks& blocks(int64_t row) const;

  // What the requests of a batch share; nothing those that may share fewer blocks than they have in
  // common with others of the batch.
  // rows, limits: of each request its row, negative for none, and how many blocks it may share.
  Forest forest(std::span<const int64_t> rows, std::span<const int64_t> limits);

 private:
  struct Row {
    Blocks blocks;
    int end = 0;  // up to the first null block
  };
  struct Place {
    int row;
    int common;  // blocks with which it and the row before it begin
  };

  static void shorten(std::vector<Place>& sharing, std::span<const int64_t> limits);
  std::vector<Place>::iterator place_of(int row);
  int common_of(const Row& one, const Row& other, int known) const;
  void sort_in(int row);

  std::vector<Row> rows_;
  std::vector<Place> sorted_;
};

}  // namespace relay
