// Attention over paged KV (flat batch, grouped heads, sliding window, soft cap), with the online softmax of Milakov and
// Gimelshein (2018): keys are taken tile by tile; the sum so far is scaled down when a larger score appears.
//
// The queries of a request that share a KV head are ``rows``, query by query, each query's heads side by side, so that
// every key and value is loaded once for all of them. Few rows (decode, draft verification) take dot products straight
// from the cache: DecodeTask. Many rows (prefill) widen a tile of keys, transposed, and of values once, and then
// multiply as a linear layer does: PrefillTask. Only slots below a request's length are read. In float32 both add in the same
// order, so that a query's output is the same, to the bit, from either task and beside any other queries.
#pragma once

#include "decode_attention.h"
#include "prefill_attention.h"

template <class T>
void attend(const Layer<T>& layer, int threads) {
    const Batch& b = layer.batch;
    int64_t queries = std::max<int64_t>(PREFILL_ROWS / layer.group(), 1);
    // Requests differ in length, so tasks are handed out one by one: a request's heads together where one thread
    // works (a block's heads are neighbours in memory), else one KV head each.
    int64_t heads = threads > 1 ? 1 : b.kv_heads;
    int64_t tasks = 0;
    std::vector<int64_t> ends;
    for (int64_t r = 0; r < b.requests; r++) {
        int64_t count = b.starts[r + 1] - b.starts[r];
        if (count * layer.group() > DECODE_ROWS)
            tasks += (count + queries - 1) / queries * b.kv_heads;
        else if (count)
            tasks += (b.kv_heads + heads - 1) / heads;
        ends.push_back(tasks);
    }
    share(tasks, threads, [&](int64_t task) {
        int64_t request = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
        int64_t index = task - (request ? ends[request - 1] : 0);
        int64_t start = b.starts[request], end = b.starts[request + 1];
        if ((end - start) * layer.group() > DECODE_ROWS) {
            int64_t first = start + index / b.kv_heads * queries;
            PrefillTask<T>{layer, request, first, std::min(first + queries, end), index % b.kv_heads}.run();
        } else {
            DecodeTask<T>{layer, request, index * heads, std::min((index + 1) * heads, b.kv_heads)}.run();
        }
    });
}
