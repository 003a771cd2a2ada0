// Threads that share one operator. With one part everything runs in the caller. Otherwise sleeping helpers are woken
// for each call and the caller does a part itself. Helpers live until the process ends. One operator at a time uses
// them: a second caller, from another engine of the process, does its parts alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

class Helpers {
   public:
    // Calls work(part) for all parts in [0, parts); returns when all are done.
    void run(int parts, const std::function<void(int)>& work) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (parts <= 1 || !turn) {
            for (int part = 0; part < parts; part++) work(part);
            return;
        }
        {
            std::lock_guard<std::mutex> guard(lock_);
            while ((int)threads_.size() < parts - 1) {
                int number = threads_.size() + 1;
                threads_.emplace_back([this, number, seen = round_.load()] { help(number, seen); });
            }
            work_ = &work, parts_ = parts, left_ = parts - 1;
            round_++;
        }
        wake_.notify_all();
        work(0);
        for (int i = 0; i < SPINS && left_; i++) pause();
        std::unique_lock<std::mutex> guard(lock_);
        done_.wait(guard, [this] { return left_ == 0; });
    }

   private:
    // Some microseconds: less than it takes to wake a thread, so that neighbouring operators find helpers awake.
    static constexpr int SPINS = 2000;

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void help(int number, uint64_t seen) {
        for (;;) {
            for (int i = 0; i < SPINS && round_ == seen; i++) pause();
            std::unique_lock<std::mutex> guard(lock_);
            wake_.wait(guard, [&] { return round_ != seen; });
            seen = round_;
            if (number >= parts_) continue;
            const std::function<void(int)>* work = work_;
            guard.unlock();
            (*work)(number);
            guard.lock();
            if (--left_ == 0) done_.notify_one();
        }
    }

    std::mutex turn_, lock_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> threads_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int> left_{0};
    int parts_ = 0;
    const std::function<void(int)>* work_ = nullptr;
};

// Never destroyed: helpers may wait in it while the process ends.
inline Helpers& helpers() {
    static Helpers* instance = new Helpers;
    return *instance;
}

// Splits [0, count) into one range per thread and calls work(start, end).
template <class Work>
void split(int64_t count, int threads, Work work) {
    int parts = (int)(count < threads ? count : threads);
    if (parts <= 1) return work((int64_t)0, count);
    helpers().run(parts, [&](int part) { work(count * part / parts, count * (part + 1) / parts); });
}

// Hands out [0, count) one by one, in order, to whoever is free: for work of unequal size.
template <class Work>
void share(int64_t count, int threads, Work work) {
    std::atomic<int64_t> next{0};
    int parts = (int)(count < threads ? count : threads);
    auto serve = [&](int) {
        for (int64_t item; (item = next++) < count;) work(item);
    };
    if (parts <= 1) return serve(0);
    helpers().run(parts, serve);
}

// Floats that a thread reuses from call to call, 64-byte aligned, contents undefined. Each tag has memory of its own.
template <class Tag>
float* scratch(int64_t count) {
    struct Free {
        void operator()(float* p) const { free(p); }
    };
    static thread_local std::unique_ptr<float[], Free> memory;
    static thread_local int64_t size = 0;
    if (count > size) {
        size = (count + 1023) / 1024 * 1024;
        memory.reset((float*)aligned_alloc(64, size * sizeof(float)));
        if (!memory) abort();
    }
    return memory.get();
}
