/* llama.cpp's DFlash for llama_loop.py: a round is that of its examples/speculative-simple, but ids go in and
 * out, end tokens are ignored, and the prompt's pass gives the first token, before the clock starts.
 *
 * Arguments are llama.cpp's own. Standard input: a prompt's ids in a line, behind how many tokens to
 * generate. Standard output: a JSON line for each, {"wall", "processor": seconds behind the first token,
 * "rounds", "tokens"}. llama.cpp's own words go to standard error. */
#include <chrono>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>

#include "arg.h"
#include "common.h"
#include "llama.h"
#include "sampling.h"
#include "speculative.h"

struct Pair {
    llama_context* target;
    llama_context* drafter;
    common_speculative* rounds;
};

/* The target runs a batch, and the drafter gets what its tapped layers thought. */
static void run(const Pair& pair, common_batch& batch) {
    if (llama_process(pair.target, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0)
        throw std::runtime_error("the target's pass failed");
    if (!common_speculative_process(pair.rounds, batch)) throw std::runtime_error("the injection failed");
}

/* Both caches forget what lies at `past` and behind it. */
static void forget(const Pair& pair, llama_pos past) {
    llama_memory_seq_rm(llama_get_memory(pair.target), 0, past, -1);
    llama_memory_seq_rm(llama_get_memory(pair.drafter), 0, past, -1);
}

/* One round behind `text`, whose last token has not been run yet: appends 1 to `most` tokens. */
static void one_round(const Pair& pair, common_sampler* sampler, llama_tokens& text, int most) {
    llama_pos past = (llama_pos)text.size() - 1;
    llama_token anchor = text.back();
    llama_tokens before(text.begin(), text.end() - 1), draft;
    if (most > 1) {  // a limit of 0 is none to common_speculative_draft
        common_speculative_get_draft_params(pair.rounds, 0) = {true, most - 1, past, anchor, &before, &draft};
        common_speculative_draft(pair.rounds);
        llama_memory_seq_rm(llama_get_memory(pair.drafter), 0, past, -1);  // the block's rows
    }
    common_batch batch(pair.target);
    batch.add(anchor, past, 0, true);
    for (size_t i = 0; i < draft.size(); ++i) batch.add(draft[i], past + 1 + (llama_pos)i, 0, true);
    run(pair, batch);
    llama_tokens kept = common_sampler_sample_and_accept_n(sampler, pair.target, draft);
    if (!draft.empty()) common_speculative_accept(pair.rounds, 0, (uint16_t)(kept.size() - 1));
    text.insert(text.end(), kept.begin(), kept.end());
    forget(pair, (llama_pos)text.size() - 1);
}

/* Generates `count` tokens behind a prompt and prints the line about it. */
static void answer(const Pair& pair, common_sampler* sampler, const llama_tokens& prompt, size_t count) {
    forget(pair, 0);
    common_sampler_reset(sampler);
    common_batch batch(pair.target);
    for (size_t i = 0; i < prompt.size(); ++i) batch.add(prompt[i], (llama_pos)i, 0, i + 1 == prompt.size());
    run(pair, batch);
    common_speculative_begin(pair.rounds, 0, prompt);
    llama_tokens text = prompt;
    text.push_back(common_sampler_sample(sampler, pair.target, (int)prompt.size() - 1));
    common_sampler_accept(sampler, text.back(), true);
    auto since = std::chrono::steady_clock::now();
    std::clock_t ticks = std::clock();
    int rounds = 0;
    for (size_t end = prompt.size() + count; text.size() < end; ++rounds)
        one_round(pair, sampler, text, (int)(end - text.size()));
    std::chrono::duration<double> wall = std::chrono::steady_clock::now() - since;
    double processor = (double)(std::clock() - ticks) / CLOCKS_PER_SEC;
    printf("{\"wall\": %.6f, \"processor\": %.6f, \"rounds\": %d, \"tokens\": [", wall.count(), processor,
           rounds);
    for (size_t i = prompt.size(); i < text.size(); ++i)
        printf("%s%d", i == prompt.size() ? "" : ", ", text[i]);
    printf("]}\n");
    fflush(stdout);
}

int main(int argc, char** argv) {
    common_init();
    common_params params;
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SPECULATIVE)) return 1;
    auto limits = common_speculative_get_output_limits(params.n_batch, params.n_parallel,
                                                       common_speculative_n_max(&params.speculative));
    params.n_outputs_max = limits.total;
    params.n_outputs_max_per_seq = limits.per_seq;
    llama_backend_init();
    auto target = common_init_from_params(params);
    if (!target->context()) return 1;
    common_params drafters = common_base_params_to_speculative(params);
    auto drafter = common_speculative_init_from_params(drafters, target->model(), target->context());
    if (!drafter->context()) return 1;
    params.speculative.draft.ctx_tgt = target->context();
    params.speculative.draft.ctx_dft = drafter->context();
    common_speculative_ptr rounds(common_speculative_init(params.speculative, 1));
    if (!rounds) return 1;
    common_sampler_ptr sampler(common_sampler_init(target->model(), params.sampling));
    Pair pair{target->context(), drafter->context(), rounds.get()};
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        size_t count = 0;
        words >> count;
        answer(pair, sampler.get(), llama_tokens(std::istream_iterator<llama_token>(words), {}), count);
    }
}
