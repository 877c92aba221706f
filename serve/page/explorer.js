"use strict";
// The script of the API explorer. Everything from the document and from answers is inserted as text, never as markup.
(async () => {
  const LONGEST = 20000; // characters of an answer that are shown
  const GROUPS = [["V1: instances", "/v1/"], ["V2: tensors (Open Inference Protocol)", "/v2"], ["OpenAI API", "/openai/"], ["Service", "/"]];
  const [place, filter, keyField, versions] = ["operations", "filter", "key", "versions"].map((id) => document.getElementById(id));

  const el = (name, properties = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key.startsWith("aria-") || key === "for" || key === "role") made.setAttribute(key, value);
      else made[key] = value;
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  };
  const pretty = (value) => {
    const lines = JSON.stringify(value, null, 2);
    return lines.replace(/\[[^[\]{}"]*\]/g, (list) => list.replace(/\s+/g, " ")); // lists of numbers on a line
  };
  const details = (title, ...children) => el("details", {}, el("summary", {}, title), ...children);

  let api;
  try {
    const response = await fetch("/openapi.json");
    api = await response.json();
    if (!response.ok) throw new Error(api.error);
  } catch (error) {
    place.replaceChildren(el("p", { className: "error", role: "alert" }, `/openapi.json cannot be read: ${error.message}`));
    return;
  }
  const resolve = (schema) => (schema.$ref ? schema.$ref.split("/").slice(1).reduce((found, name) => found[name], api) : schema);
  keyField.hidden = !api.security;

  // ---- one operation ----

  let count = 0;
  const labelled = (text, field) => {
    field.id = `field-${++count}`;
    return el("div", {}, el("label", { for: field.id }, text), field);
  };

  function requestForm(path, method, operation) {
    const content = operation.requestBody?.content || {};
    const types = Object.keys(content);
    const headers = (operation.parameters || []).map((one) => [one, el("input", { placeholder: one.description })]);
    const kind = el("select", {}, ...types.map((type) => el("option", {}, type)));
    const { example, schema } = content[types[0]] || { schema: {} };
    const text = el("textarea", { spellcheck: false, value: pretty(example ?? resolve(schema).examples?.[0] ?? {}) });
    const file = el("input", { type: "file", "aria-label": "Body of the request" });
    const body = labelled("Body", text);
    const upload = labelled("Body from a file", file);
    const isFile = () => types.length > 0 && !kind.value.includes("json");
    const update = () => { [body.hidden, upload.hidden] = [!types.length || isFile(), !isFile()]; };
    kind.onchange = update;
    update();

    const answer = el("div", { className: "response", "aria-live": "polite" }, el("p", { className: "muted" }, "The answer appears here."));
    const button = el("button", { className: "main" }, "Send");
    button.onclick = async () => {
      button.disabled = true;
      const sent = { method: method.toUpperCase(), headers: {} };
      for (const [one, field] of headers) if (field.value) sent.headers[one.name] = field.value;
      if (keyField.value) sent.headers["x-api-key"] = keyField.value;
      if (types.length) {
        sent.headers["content-type"] = kind.value;
        sent.body = isFile() ? file.files[0] : text.value;
      }
      await show(answer, path, sent);
      button.disabled = false;
    };
    const form = el("div", { className: "request" },
      types.length > 1 ? labelled("Content type", kind) : null, body, upload,
      headers.length ? el("div", { className: "parameters" }, ...headers.map(([one, field]) => labelled(one.name, field))) : null,
      el("div", { className: "buttons" }, button));
    return [form, answer];
  }

  async function show(answer, path, sent) {
    const began = performance.now();
    try {
      const response = await fetch(path, sent);
      const bytes = await response.arrayBuffer();
      const took = performance.now() - began;
      answer.replaceChildren(
        el("p", { className: "status" },
          el("span", { className: `pill ${response.ok ? "good" : "bad"}` }, `${response.status} ${response.statusText}`),
          `${took.toFixed(1)} ms`, el("span", {}, `${bytes.byteLength.toLocaleString("en")} bytes`)),
        el("pre", {}, readable(response.headers.get("content-type") || "", bytes)),
        details("Headers", el("pre", {}, [...response.headers].map((pair) => pair.join(": ")).join("\n"))),
        details("As a command", el("pre", {}, command(path, sent))));
    } catch (error) {
      answer.replaceChildren(el("p", { className: "error", role: "alert" }, `The service did not answer: ${error.message}`));
    }
  }

  function readable(type, bytes) {
    if (type.includes("octet-stream")) return `${bytes.byteLength} bytes of JSON and raw tensors`;
    let text = new TextDecoder().decode(bytes);
    try {
      text = pretty(JSON.parse(text));
    } catch { /* it is another text */ }
    return text.length > LONGEST ? `${text.slice(0, LONGEST)}\n… (${text.length.toLocaleString("en")} characters)` : text || "(no body)";
  }

  function command(path, sent) {
    const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    const words = [`curl -s ${quote(location.origin + path)}`];
    if (sent.method !== "GET" && sent.body === undefined) words.push(`-X ${sent.method}`);
    for (const [name, value] of Object.entries(sent.headers)) words.push(`-H ${quote(`${name}: ${name === "x-api-key" ? "KEY" : value}`)}`);
    if (typeof sent.body === "string") words.push(`-d ${quote(sent.body)}`);
    else if (sent.body) words.push(`--data-binary @${quote(sent.body.name)}`);
    return words.join(" \\\n  ");
  }

  function schemas(operation) {
    const rows = Object.entries(operation.responses).map(([status, response]) =>
      el("tr", {}, el("td", {}, el("code", {}, status)), el("td", {}, response.description)));
    const shown = (title, content) => {
      const schema = content?.["application/json"]?.schema;
      return schema ? details(title, el("pre", {}, pretty(resolve(schema)))) : null;
    };
    return el("div", { className: "schema" },
      shown("Schema of the request", operation.requestBody?.content), shown("Schema of the answer", operation.responses["200"]?.content),
      details("Statuses", el("table", {}, el("tbody", {}, ...rows))));
  }

  function operationItem(path, method, operation) {
    const item = el("details", { className: "operation" },
      el("summary", {}, el("b", { className: `method ${method}` }, method.toUpperCase()), el("code", {}, path), el("span", {}, operation.summary)));
    item.ontoggle = () => {
      if (item.children.length === 1) item.append(el("div", {}, ...requestForm(path, method, operation), schemas(operation)));
    };
    return { item, path, text: `${path} ${operation.summary}`.toLowerCase() };
  }

  // ---- the list ----

  const operations = Object.entries(api.paths).flatMap(([path, item]) =>
    Object.entries(item).filter(([method]) => method !== "head").map(([method, operation]) => operationItem(path, method, operation)));
  const groups = GROUPS.map(([title, prefix], index) => {
    const own = operations.filter(({ path }) => GROUPS.findIndex(([, start]) => path.startsWith(start)) === index);
    return { own, section: el("section", { className: "group" }, el("h2", {}, title), ...own.map(({ item }) => item)) };
  });
  const select = () => {
    for (const { own, section } of groups) {
      for (const { item, path, text } of own) {
        item.hidden = !text.includes(filter.value.toLowerCase()) || (path.includes("/versions/") && !versions.checked);
      }
      section.hidden = own.every(({ item }) => item.hidden);
    }
  };
  filter.oninput = versions.onchange = select;
  select();
  place.replaceChildren(...groups.map(({ section }) => section));
})();
