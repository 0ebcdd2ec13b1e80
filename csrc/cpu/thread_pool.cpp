#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins before it sleeps. The least is longer than the time between two ops of a step. The most is
// about the time between two steps: waking up is dear where it takes an interrupt of another virtual CPU. Beyond the
// least, a thread may spin for one part in kWorkPerSpin of the time that it has worked, so that an idle engine uses no
// CPU time.
constexpr std::chrono::nanoseconds kLeastSpin = std::chrono::microseconds(60), kMostSpin = std::chrono::milliseconds(1);
constexpr int kWorkPerSpin = 8;

#if defined(__x86_64__)
constexpr unsigned kFlushDenormals = 0x8040;  // FTZ and DAZ
constexpr unsigned kDefaultMxcsr = 0x1f80;    // all exceptions masked, round to nearest even

void pause() { _mm_pause(); }
uint64_t enter_fp_mode() {
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(kDefaultMxcsr | kFlushDenormals);
    return saved;
}
void restore_fp_mode(uint64_t saved) { _mm_setcsr(static_cast<unsigned>(saved)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushDenormals = 1u << 24;  // FPCR.FZ

void pause() { asm volatile("yield"); }
uint64_t enter_fp_mode() {
    uint64_t saved;
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    asm volatile("msr fpcr, %0" ::"r"(kFlushDenormals));
    return saved;
}
void restore_fp_mode(uint64_t saved) { asm volatile("msr fpcr, %0" ::"r"(saved)); }
#else
void pause() {}
uint64_t enter_fp_mode() { return 0; }
void restore_fp_mode(uint64_t) {}
#endif

// Asks for the cache lines that a waiting thread will read next: weights of the op that comes.
class Fetcher {
public:
    // There are `num_bytes` from `data` on; the thread fetches no more of them than its cache has room for.
    Fetcher(const char* data, int64_t num_bytes) : next_(data), end_(data + std::min(num_bytes, kMostBytes)) {}

    // Asks for some more lines. Returns false when all have been asked for.
    bool fetch() {
        if (next_ >= end_) return false;
        for (int i = 0; i < 8; ++i) __builtin_prefetch(next_ + i * 64, 0, 2);
        next_ += 8 * 64;
        return true;
    }

private:
    static constexpr int64_t kMostBytes = 256 << 10;
    const char *next_, *end_;
};

// How one thread waits: it spins at first, then it sleeps.
//
// What it may spin is earned by work. The account is a point in time, `work_start_`: an eighth (1 / kWorkPerSpin) of
// the time since then may be spent on spinning, at least kLeastSpin and at most kMostSpin.
//
//     work_start_                 wait() begins
//     |---------------------------|---------- spins ----------|   sleeps ...
//                8 parts                 at most 1 part
//
// A wait that ends while the thread spins moves `work_start_` forwards by nine times what it took: that time was no
// work, and eight times as much work has paid for it. `work_start_` never passes the present, so there are no debts:
// many short waits between ops do not forbid the long one between steps. A thread that has slept starts with nothing.
class Waiter {
public:
    // Spins until `done` is true and fetches meanwhile. After its time it calls `sleep`, which may return early.
    template <class Done, class Sleep>
    void wait(Done done, Fetcher fetcher, Sleep sleep) {
        const auto start = Clock::now();
        work_start_ = std::max(work_start_, start - kWorkPerSpin * kMostSpin);  // more than kMostSpin is not saved up
        const auto most = std::max((start - work_start_) / kWorkPerSpin, kLeastSpin);
        auto now = start;
        do {
            for (int i = 0; i < 32; ++i) {
                if (done()) {
                    work_start_ = std::min(work_start_ + (1 + kWorkPerSpin) * (now - start), now);
                    return;
                }
                if (!fetcher.fetch()) pause();
            }
            now = Clock::now();
        } while (now - start < most);
        while (!done()) sleep();
        work_start_ = Clock::now();
    }

private:
    Clock::time_point work_start_ = Clock::now();
};

// A job is `fn` called for each unit in [0, num_units). One number publishes it and hands its units out:
//
//     ticket_ = serial number of the job << 32 | units that nobody has claimed yet
//
//     run():   fn_, context_, num_units_, num_done_ = 0      relaxed stores, ordered before
//              ticket_ = (serial, num_units)                 the release store that publishes them
//              serial_ = serial, notify                      which wakes the threads that sleep
//     work():  read ticket_ (acquire), then fn_, context_, num_units_
//              compare-and-swap ticket_ -> ticket_ - claimed     (tried again if it fails)
//              fn(context, unit) for the claimed units
//              num_done_ += units done by this thread, notify
//     run():   claims units like all others, then waits until num_done_ = num_units
//
// Why a late thread does no harm: a thread may sleep through a job, or read the ticket of one job and be suspended
// until the next. If another job has been published meanwhile, its compare-and-swap fails, because the serial number in
// the ticket has changed. If it succeeds, the job has not changed since the ticket was read, for a job ends only when
// all its units are done, and these were not claimed. So what the thread read of fn_ and context_ belongs to its units,
// and run() waits for units, never for threads.
//
// A thread claims many units while many are left, so that it reads memory in long runs, and one at a time in the end.
class ThreadPool {
public:
    std::mutex& mutex() { return mutex_; }
    int num_threads() const { return num_threads_; }
    uint64_t progress() const {
        return ticket_.load(std::memory_order_relaxed) + num_inline_.load(std::memory_order_relaxed);
    }

    void resize(int n) {
        stop_.store(true);
        serial_.fetch_add(1);
        serial_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
        stop_.store(false);
        num_threads_ = n;
        for (int i = 1; i < n; ++i) workers_.emplace_back([this, i, seen = serial_.load()] { loop(i, seen); });
    }

    // Only one job at a time: the caller holds an OpScope.
    void run(int64_t num_units, void (*fn)(const void*, int64_t) noexcept, const void* context) noexcept {
        if (num_units <= 1 || workers_.empty()) {
            for (int64_t unit = 0; unit < num_units; ++unit) {
                num_inline_.store(num_inline_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
                fn(context, unit);
            }
            return;
        }
        fn_.store(fn, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        num_units_.store(static_cast<uint32_t>(num_units), std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        const uint32_t serial = serial_.load(std::memory_order_relaxed) + 1;
        ticket_.store(uint64_t{serial} << 32 | static_cast<uint32_t>(num_units), std::memory_order_release);
        serial_.store(serial);
        serial_.notify_all();
        work();
        const auto all_done = [&] {
            return num_done_.load(std::memory_order_acquire) == static_cast<uint32_t>(num_units);
        };
        // The caller claims first when the next job begins, so it fetches from the beginning of what comes.
        waiter_.wait(all_done, fetcher(0.0), [&] {
            const uint32_t num_done = num_done_.load(std::memory_order_acquire);
            if (num_done != static_cast<uint32_t>(num_units)) num_done_.wait(num_done);
        });
    }

    void read_ahead(const void* data, int64_t num_bytes) noexcept {
        ahead_.store(static_cast<const char*>(data), std::memory_order_relaxed);
        ahead_bytes_.store(num_bytes, std::memory_order_relaxed);
    }

    void* workspace(size_t num_bytes) {
        if (num_bytes > workspace_bytes_) {
            std::free(workspace_);
            workspace_bytes_ = 0;
            const size_t rounded = (num_bytes + num_bytes / 4 + 63) & ~size_t{63};
            workspace_ = std::aligned_alloc(64, rounded);
            if (!workspace_) throw std::bad_alloc();
            workspace_bytes_ = rounded;
        }
        return workspace_;
    }

private:
    // Of what `read_ahead` has named, the part from `start` on, a share of the whole.
    Fetcher fetcher(double start) const {
        const int64_t num_bytes = ahead_bytes_.load(std::memory_order_relaxed);
        const auto skipped = static_cast<int64_t>(start * static_cast<double>(num_bytes));
        return Fetcher(ahead_.load(std::memory_order_relaxed) + skipped, num_bytes - skipped);
    }

    void loop(int index, uint32_t seen) noexcept {
        enter_fp_mode();
        Waiter waiter;
        // Where this thread's first claim is likely to begin: each claim takes 1 / (2 num_threads) of what is left, and
        // `index` threads claim before it.
        const double start = 1.0 - std::pow(1.0 - 0.5 / num_threads_, index);
        while (true) {
            waiter.wait([&] { return serial_.load(std::memory_order_acquire) != seen; }, fetcher(start),
                        [&] { serial_.wait(seen); });
            seen = serial_.load(std::memory_order_acquire);
            if (stop_.load()) return;
            work();
        }
    }

    // Claims units until none is left, then reports how many it has done.
    void work() noexcept {
        uint32_t num_done = 0;
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (static_cast<uint32_t>(ticket) != 0) {
            const auto fn = fn_.load(std::memory_order_relaxed);
            const auto context = context_.load(std::memory_order_relaxed);
            const uint32_t num_left = static_cast<uint32_t>(ticket);
            const uint32_t num_claimed = std::max(num_left / (2 * static_cast<uint32_t>(num_threads_)), 1u);
            const uint32_t first = num_units_.load(std::memory_order_relaxed) - num_left;
            if (!ticket_.compare_exchange_weak(ticket, ticket - num_claimed, std::memory_order_acq_rel,
                                               std::memory_order_acquire))
                continue;
            for (uint32_t unit = first; unit < first + num_claimed; ++unit) fn(context, unit);
            num_done += num_claimed;
            ticket = ticket_.load(std::memory_order_acquire);
        }
        if (num_done) {
            num_done_.fetch_add(num_done);
            num_done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::vector<std::thread> workers_;
    Waiter waiter_;  // the caller's
    int num_threads_ = 1;
    void* workspace_ = nullptr;
    size_t workspace_bytes_ = 0;
    std::atomic<bool> stop_ = false;
    alignas(64) std::atomic<uint32_t> serial_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_ = 0;
    std::atomic<void (*)(const void*, int64_t) noexcept> fn_ = nullptr;
    std::atomic<const void*> context_ = nullptr;
    std::atomic<uint32_t> num_units_ = 0;
    std::atomic<const char*> ahead_ = nullptr;
    std::atomic<int64_t> ahead_bytes_ = 0;
    alignas(64) std::atomic<uint32_t> num_done_ = 0;
    std::atomic<uint64_t> num_inline_ = 0;  // units of jobs that were not published
};

// Never destroyed: its threads sleep on it until the process ends.
ThreadPool& pool() {
    static ThreadPool* instance = new ThreadPool();
    return *instance;
}

}  // namespace

void parallel_for(int64_t num_units, void (*fn)(const void*, int64_t) noexcept, const void* context) noexcept {
    pool().run(num_units, fn, context);
}

int num_threads() {
    std::lock_guard lock(pool().mutex());
    return pool().num_threads();
}

uint64_t progress() { return pool().progress(); }

void set_num_threads(int n) {
    if (n < 1) throw std::invalid_argument("number of threads must be at least 1, not " + std::to_string(n));
    std::lock_guard lock(pool().mutex());
    if (n != pool().num_threads()) pool().resize(n);
}

OpScope::OpScope() {
    pool().mutex().lock();
    saved_fp_mode_ = enter_fp_mode();
}

OpScope::~OpScope() {
    restore_fp_mode(saved_fp_mode_);
    pool().mutex().unlock();
}

void OpScope::read_ahead(const void* data, int64_t num_bytes) noexcept { pool().read_ahead(data, num_bytes); }

void* OpScope::workspace(size_t num_bytes) { return pool().workspace(num_bytes); }

}  // namespace octavo
