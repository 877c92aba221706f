"""Breaks of serve: the service, its protocols, and the roll-out of bundles to it."""

from __future__ import annotations

from tests.breaks.breaks import Break

BREAKS: tuple[Break, ...] = (
    # Keys, certificates and signatures
    Break(
        "an unknown key opens the service",
        "serve/security.py",
        "        if not known:",
        "        if browser and not known:",
        "tests/serve/test_keys.py::test_other_credentials_are_refused",
    ),
    Break(
        "a grpc call that needs no key",
        "serve/grpc/service.py",
        "if self._keys is not None and (head.method is None or head.method.needs_key):",
        "if self._keys is not None and head.method is None:",
        "tests/serve/grpc/test_rpc_refusals.py::test_missing_key_is_rejected_before_the_message",
    ),
    Break(
        "names of models can be guessed without a key",
        "serve/routes.py",
        '_PROBED = frozenset({"live", "ready"})',
        '_PROBED = frozenset({"live", "ready", "model_ready"})',
        "tests/serve/test_routes.py::test_only_probes_need_no_key",
    ),
    Break(
        "a certificate replaced before its key ends tls",
        "serve/security.py",
        'self.pair.load_into(_context(""))',
        "pass",
        "tests/serve/test_tls.py::test_certificate_without_its_new_key_changes_nothing",
    ),
    Break(
        "an unsigned bundle is served where signatures are required",
        "serve/options.py",
        "open_bundle(path, self.trust)",
        "open_bundle(path)",
        "tests/serve/test_trust.py::test_untrusted_bundle_is_refused_before_its_codec_is_loaded",
    ),
    # Text that must not get in or out
    Break(
        "an internal error shows its text to clients",
        "serve/app.py",
        'body = {"error": INTERNAL if refusal is None else str(refusal)}',
        'body = {"error": str(refusal or error)}',
        "tests/serve/test_app.py::test_internal_error_is_an_opaque_500_with_a_traceback_in_the_log",
    ),
    Break(
        "a client's request id forges a header or a log line",
        "serve/wire/request.py",
        "_SAFE_ID.fullmatch(given)",
        "_SAFE_ID.match(given)",
        "tests/serve/wire/test_request.py::test_invalid_request_id_is_replaced",
    ),
    Break(
        "an example of a model runs as script on the page",
        "serve/page/page.py",
        '.replace("<", "\\\\u003c")',
        "",
        "tests/serve/page/test_page.py::test_embedded_data_cannot_close_its_element",
    ),
    Break(
        "a body in a coding that only a proxy knows hides a second request",
        "serve/wire/http1.py",
        '    if codings == [b"chunked"]:',
        '    if codings[-1] == b"chunked":',
        "tests/serve/wire/http1/test_strictness.py::test_a_forbidden_request_is_refused_and_nothing_behind_it_is_read",
    ),
    # Limits of connections, bodies and memory
    Break(
        "one ipv6 network takes all connections",
        "serve/wire/connection_limits.py",
        "    return address.packed[:_HOST_BYTES].hex()",
        "    return address.packed.hex()",
        "tests/serve/wire/test_connection_limits.py::test_peers_are_counted_by_their_network",
    ),
    Break(
        "a client that reads none of its answers keeps its connection",
        "serve/wire/connection_limits.py",
        "            return now >= self._due\n",
        "            return False\n",
        "tests/serve/wire/http2/test_connection.py::test_client_that_never_reads_is_paused_then_disconnected",
    ),
    Break(
        "what clients are about to send is lost when the service ends",
        "serve/wire/listeners.py",
        "        await self._await_requests()\n",
        "",
        "tests/serve/process/test_server.py::test_shutdown_answers_late_requests_of_connected_clients",
    ),
    Break(
        "a body that inflates without limit is accepted",
        "serve/request_body.py",
        "MAX_INFLATION * self.fed)",
        "MAX_INFLATION * self.made)",
        "tests/serve/test_request_body.py::test_body_that_inflates_too_much_is_refused_while_it_grows",
    ),
    Break(
        "JSON becomes any number of objects",
        "serve/limits.py",
        "self._object_bytes += found",
        "self._object_bytes += 0",
        "tests/serve/test_limits.py::test_a_body_of_far_more_values_than_the_model_takes_is_refused[[],]",
    ),
    Break(
        "an address may have any number of large bodies refused",
        "serve/limits.py",
        "self._debt(request.address) + request.work",
        "request.work",
        "tests/serve/test_limits.py::test_an_address_whose_large_bodies_are_refused_waits_and_others_do_not",
    ),
    Break(
        "bodies are decoded in the threads of inference",
        "serve/model_version.py",
        "time.monotonic, self._budget.decoders",
        "time.monotonic, self.batcher._pool",
        "tests/serve/test_limits.py::test_decoding_does_not_wait_for_inference",
    ),
    Break(
        "refused requests never give their memory back",
        "serve/app.py",
        "            if request.held_bytes:\n",
        "            if request.held_bytes and request.status == 200:\n",
        "tests/serve/test_request_body.py::test_refused_requests_give_their_memory_back",
    ),
    # The numbers of a request
    Break(
        "a number out of range wraps around",
        "serve/protocol/tensors.py",
        "        if wide.min() < limits.min or wide.max() > limits.max:",
        "        if wide.max() > limits.max:",
        "tests/serve/protocol/test_tensors.py::test_data_must_match_datatype_and_shape",
    ),
    Break(
        "null reaches a model that never saw a missing number",
        "serve/protocol/validate.py",
        'if array.dtype.kind == "f" and not spec.allows_missing and',
        'if array.dtype.kind == "f" and spec.allows_missing and',
        "tests/serve/runtime/test_predictor.py::test_null_is_refused_where_no_number_was_missing",
    ),
    # Batching and deadlines
    Break(
        "clients get rows of one another",
        "serve/runtime/batcher.py",
        "        start += item.rows\n",
        "        start += 1\n",
        "tests/serve/runtime/test_batcher.py::test_thousand_mixed_requests_get_their_own_rows",
    ),
    Break(
        "an error of one client fails all of its batch",
        "serve/runtime/batcher.py",
        "            if len(batch) == 1:\n                return [error]",
        "            if batch:\n                return [error] * len(batch)",
        "tests/serve/runtime/test_batcher.py::test_failing_request_is_isolated_by_halving_the_batch",
    ),
    Break(
        "rows that influence each other share a batch",
        "serve/model_version.py",
        "        mergeable=not predictor.unbatched_reason,",
        "        mergeable=not predictor.signature.unbatched_reason,",
        "tests/serve/test_model_version.py::test_model_that_mixes_rows_is_not_batched",
    ),
    Break(
        "the deadline of the bundle is ignored",
        "serve/load_shedding.py",
        "(timeout if timeout < math.inf else version.default_timeout_seconds)",
        "timeout",
        "tests/serve/test_model_version.py::test_shortest_timeout_of_client_wins_over_that_of_bundle",
    ),
    # Loading, versions and canaries
    Break(
        "a bundle is served without its golden requests",
        "serve/runtime/loading.py",
        "    verify(bundle, predictor)\n",
        "",
        "tests/serve/test_main.py::test_check_fails_with_a_wrong_golden_answer",
    ),
    Break(
        "golden predictions of the codec are not compared",
        "serve/runtime/selfcheck.py",
        "        checks = (_tensor_mismatch, _prediction_mismatch, _generation_mismatch)",
        "        checks = (_tensor_mismatch, _generation_mismatch)",
        "tests/serve/runtime/test_selfcheck.py::test_changed_prediction_is_named",
    ),
    Break(
        "a service that drains is reported as ready",
        "serve/models.py",
        "        return bool(self._models) and not self.draining",
        "        return bool(self._models)",
        "tests/serve/test_models.py::test_service_is_ready_if_it_has_models_and_does_not_drain",
    ),
    Break(
        "a request that names its version is answered by the canary",
        "serve/app.py",
        "payload = v1.Payload(body, is_file)\n        if version.canary is not None and not route.version:",
        "payload = v1.Payload(body, is_file)\n        if version.canary is not None:",
        "tests/serve/test_canary.py::test_request_that_names_a_version_gets_it_whatever_its_id[v1]",
    ),
    # HTTP/2
    Break(
        "a request gets the key and path of an earlier one",
        "serve/wire/http2/headers.py",
        "            self._table_version = self._decoder.table_version\n            self._cache.clear()",
        "            self._table_version = self._decoder.table_version",
        "tests/serve/wire/http2/test_streams.py::test_table_change_invalidates_cached_header_blocks",
    ),
    Break(
        "a header table that grows for ever",
        "serve/wire/http2/hpack.py",
        "        self._table_bytes += _cost(field)\n        self._shrink()",
        "        self._table_bytes += _cost(field)",
        "tests/serve/wire/http2/test_hpack.py::test_entry_larger_than_the_table_empties_it",
    ),
    Break(
        "a flood of resets costs the client nothing",
        "serve/wire/connection_limits.py",
        "            self._budget += min(FLOOD_BUDGET, int((now - self._refilled_at) * BUDGET_PER_SECOND))",
        "            self._budget += FLOOD_BUDGET",
        "tests/serve/wire/http2/test_floods.py::test_work_of_a_flood_is_bounded_by_its_bytes[rapid reset]",
    ),
    # Generated texts
    Break(
        "a seed is ignored",
        "serve/llm/sequence.py",
        "        return np.random.default_rng(None if seed is None else [seed, self.index])",
        "        return np.random.default_rng()",
        "tests/serve/llm/test_engine.py::test_sequences_of_one_prompt_are_sampled_independently_by_seed",
    ),
    Break(
        "padding of a batch changes a text",
        "serve/llm/kv_cache.py",
        "        return (np.arange(self.past + new) >= self.pads[:, None]).astype(np.int64)",
        "        return np.ones((self.rows, self.past + new), np.int64)",
        "tests/serve/llm/test_engine.py::test_text_does_not_depend_on_the_batch",
    ),
    # Metrics and the end of the process
    Break(
        "requests are counted again at each look",
        "serve/monitoring/metrics.py",
        "        buffer, self._buffer = self._buffer, []",
        "        buffer = list(self._buffer)",
        "tests/serve/monitoring/test_metrics.py::test_requests_are_counted_whatever_the_scrape_interval",
    ),
    Break(
        "connections that wait when the service ends are reset",
        "serve/wire/accepting.py",
        "            clients.append(sock.accept()[0])",
        "            sock.accept()[0].close()",
        "tests/serve/process/test_sockets.py::test_closing_listener_returns_its_queue_and_ignores_new_handshakes",
    ),
    # Roll-out
    Break(
        "a bundle gets requests though its golden answers are wrong",
        "pipeline/service/rollout.py",
        "        golden_count = _verify(process, request, ports, log)\n",
        "        wait_until_ready(process, ports.standby, log, request.timeout_seconds)\n        golden_count = 0\n",
        "tests/pipeline/service/test_rollout.py::test_a_bundle_gets_requests_only_once_its_golden_answers_are_right[2.1]",
    ),
    Break(
        "a process that took over an old process id is ended",
        "pipeline/service/process.py",
        "is_same = abs(process.create_time() - started) < 1 and",
        "is_same =",
        "tests/pipeline/service/test_process.py::test_another_process_with_the_same_pid_is_neither_alive_nor_ended",
    ),
    Break(
        "a canary is recorded as the version that serves",
        "pipeline/service/cluster_record.py",
        '    if deployed.get("canary"):',
        '    if deployed.get("canary_in_place"):',
        "tests/pipeline/service/test_cluster_record.py::test_a_canary_replaces_nothing_until_it_is_promoted",
    ),
)
