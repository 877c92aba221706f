"use strict";
// The page's only script. Everything from the model is inserted as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { form } = data;

  const el = (name, properties = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key.startsWith("aria-") || key === "for" || key === "role") made.setAttribute(key, value);
      else made[key] = value;
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  };
  const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });
  const place = document.getElementById("form");
  const answer = document.getElementById("answer");

  // ---- requests ----

  let latest = 0;

  async function post(path, body, sent = null) {
    const requestNumber = ++latest; // the answer is shown unless a later request was sent
    const began = performance.now();
    let outcome;
    try {
      const response = await fetch(path, { method: "POST", body, headers: { "content-type": "application/json" } });
      const text = await response.text();
      outcome = { response, text, sent, took: performance.now() - began };
    } catch (error) {
      outcome = { problem: `the service did not answer: ${error.message}` };
    }
    if (requestNumber === latest) show(outcome);
  }

  function show({ response, text, sent, took, problem }) {
    if (problem) {
      answer.replaceChildren(el("p", { className: "error", role: "alert" }, problem));
      return;
    }
    let result;
    try {
      result = JSON.parse(text);
    } catch {
      result = { error: text.slice(0, 400) };
    }
    const bundle = (response.headers.get("x-bundle-digest") || "").slice(0, 12);
    const line = [`${took.toFixed(1)} ms round trip`, `bundle ${bundle}`];
    if (response.headers.get("x-request-id")) line.push(`request ${response.headers.get("x-request-id")}`);
    const shown = response.ok
      ? [...summarize(result, sent), details("Raw answer", el("pre", {}, JSON.stringify(result, shortened, 1)))]
      : [el("p", { className: "error", role: "alert" }, `${response.status}: ${result.error?.message || result.error || text.slice(0, 400)}`)];
    answer.replaceChildren(...shown.slice(0, 2), el("p", { className: "took" }, line.join(" · ")), ...shown.slice(2));
  }

  const details = (title, ...children) => el("details", {}, el("summary", {}, title), ...children);

  const shortened = (_, value) =>
    (typeof value === "string" && value.length > 4000 ? `${value.slice(0, 60)}… (${value.length} characters)` : value);

  /** Return the elements that show the first prediction, or each output; `sent` is the picture of the request. */
  function summarize(result, sent) {
    if (Array.isArray(result.choices)) {
      const texts = result.choices.map((one) => el("pre", { className: "text" }, one.text ?? one.message.content));
      return [el("div", {}, ...texts), el("div")];
    }
    if (Array.isArray(result.predictions)) {
      const [first] = result.predictions;
      const isObject = first !== null && typeof first === "object" && !Array.isArray(first) && !pictureUrl(first);
      return facts(isObject ? first : { prediction: first }, sent);
    }
    return facts(Object.fromEntries((result.outputs || []).map((one) => [one.name, one.data || `${one.shape} raw`])));
  }

  function facts(fields, sent = null) {
    const [values, charts, pictures] = [[], [], []];
    const boxes = boxesIn(fields);
    for (const [name, value] of Object.entries(fields)) {
      const url = pictureUrl(value);
      if (url) pictures.push(figure(name, el("img", { src: url, alt: name })));
      else if (isMatrix(value)) pictures.push(figure(name, matrixPicture(name, value)));
      else if (numbers(value)) charts.push(bars(name, value));
      else if (isRows(value)) charts.push(rowsTable(name, value));
      else if (Array.isArray(value) && value.length && value.every((one) => typeof one === "string")) values.push([name, value.join(", ")]);
      else if (value === null || typeof value !== "object") values.push([name, value]);
    }
    if (sent && boxes.length) pictures.unshift(figure("boxes", boxesPicture(sent, boxes)));
    else if (sent && pictures.length) pictures.unshift(figure("sent", el("img", { src: sent, alt: "the picture that was sent" })));
    const list = values.map(([name, value], index) =>
      el("div", { className: index === 0 && String(value).length < 40 ? "first" : "" }, el("dt", {}, name),
        el("dd", {}, typeof value === "number" ? number(value) : String(value))));
    return [el("dl", { className: "result", hidden: list.length === 0 }, ...list),
      el("div", {}, el("div", { className: "pictures", hidden: pictures.length === 0 }, ...pictures), ...charts)];
  }

  const figure = (text, picture) => el("figure", {}, picture, el("figcaption", {}, text));

  /** The address of a picture: base64 of a PNG or JPEG file, bare or as {"b64": …}; else "". */
  function pictureUrl(value) {
    const text = value !== null && typeof value === "object" && Object.keys(value).join() === "b64" ? value.b64 : value;
    if (typeof text !== "string" || text.length < 40 || !/^[A-Za-z0-9+/]+={0,2}$/.test(text)) return "";
    const kind = text.startsWith("iVBORw0KGgo") ? "png" : text.startsWith("/9j/") ? "jpeg" : "";
    return kind && `data:image/${kind};base64,${text}`;
  }

  const isMatrix = (value) => Array.isArray(value) && value.length >= 4
    && value.every((row) => Array.isArray(row) && row.length >= 4 && row.length === value[0].length
      && row.every((one) => typeof one === "number"));

  /** Draw rows of numbers in greys, from the lowest to the highest. */
  function matrixPicture(name, rows) {
    const [width, height] = [rows[0].length, rows.length];
    const canvas = el("canvas", { className: "seen", width, height, role: "img", "aria-label": name });
    const image = new ImageData(width, height);
    const flat = rows.flat();
    const [least, most] = flat.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]);
    flat.forEach((one, index) => {
      const grey = (255 * (one - least)) / (most - least || 1);
      image.data.set([grey, grey, grey, 255], 4 * index);
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  const isRows = (value) => Array.isArray(value) && value.length > 0 && value.length <= 200
    && value.every((one) => one !== null && typeof one === "object" && !Array.isArray(one) && Object.keys(one).length <= 8);

  function rowsTable(name, rows) {
    const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const cell = (value) => (value === undefined ? "" : typeof value === "number" ? number(value)
      : typeof value === "object" ? JSON.stringify(value) : String(value));
    const head = el("tr", {}, ...columns.map((column) => el("th", {}, column)));
    const body = rows.map((row) => el("tr", {}, ...columns.map((column) => el("td", {}, cell(row[column])))));
    return el("div", { className: "scroll", role: "group", "aria-label": name },
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  }

  /** Boxes with corners in pixels: [{"box": [left, top, right, bottom], "label": …, "score": …}], or one list for each. */
  function boxesIn(fields) {
    const corners = (box) => {
      const edges = Array.isArray(box) ? box : box && typeof box === "object" ? [box.xmin, box.ymin, box.xmax, box.ymax] : [];
      return edges.length === 4 && edges.every((one) => typeof one === "number") ? edges : null;
    };
    const lists = Object.values(fields).filter((value) => isRows(value) && value.every((row) => corners(row.box)));
    if (lists.length) return lists.flat().map((row) => ({ edges: corners(row.box), label: row.label, score: row.score }));
    const { boxes, labels = [], scores = [] } = fields;
    if (!Array.isArray(boxes) || !boxes.every(corners)) return [];
    return boxes.map((box, index) => ({ edges: corners(box), label: labels?.[index], score: scores?.[index] }));
  }

  function boxesPicture(url, boxes) {
    const canvas = el("canvas", { className: "boxes", width: 1, height: 1, role: "img", "aria-label": `${boxes.length} boxes on the picture that was sent` });
    const picture = el("img", { src: url });
    picture.decode().then(() => {
      const scale = Math.max(1, 640 / picture.naturalWidth); // lines and texts stay sharp on small pictures
      canvas.width = Math.round(picture.naturalWidth * scale);
      canvas.height = Math.round(picture.naturalHeight * scale);
      const pencil = canvas.getContext("2d");
      pencil.drawImage(picture, 0, 0, canvas.width, canvas.height);
      pencil.lineWidth = canvas.width / 200;
      pencil.font = `600 ${Math.round(canvas.width / 26)}px system-ui, sans-serif`;
      for (const { edges: [left, top, right, bottom], label, score } of boxes) {
        const text = [label, typeof score === "number" ? score.toFixed(2) : null].filter((one) => one !== undefined && one !== null).join(" ");
        pencil.strokeStyle = pencil.fillStyle = getComputedStyle(canvas).getPropertyValue("--one");
        pencil.strokeRect(left * scale, top * scale, (right - left) * scale, (bottom - top) * scale);
        const high = canvas.width / 20;
        const y = Math.max(top * scale - high, 0);
        if (!text) continue;
        pencil.fillRect(left * scale, y, pencil.measureText(text).width + high / 2, high);
        pencil.fillStyle = getComputedStyle(canvas).getPropertyValue("--card");
        pencil.fillText(text, left * scale + high / 4, y + high * 0.78);
      }
    }, () => canvas.replaceWith(el("p", { className: "muted" }, "The browser cannot read this picture.")));
    return canvas;
  }

  const numbers = (value) =>
    Array.isArray(value) && value.length > 1 && value.length <= 32 && value.some((one) => one !== null)
    && value.every((one) => one === null || typeof one === "number"); // null is NaN or infinite

  function bars(name, values) {
    const known = values.filter((value) => value !== null);
    const most = Math.max(...known);
    const least = Math.min(0, ...known);
    const rows = values.flatMap((value, index) => {
      const bar = el("i", { className: value === most ? "most" : "" });
      bar.style.setProperty("--share", `${value === null ? 0 : (100 * (value - least)) / (most - least || 1)}%`);
      const small = Math.abs(value) < Math.abs(most) / 1000;
      if (value === null) return [el("b", {}, String(index)), bar, el("span", {}, "null")];
      return [el("b", {}, String(index)), bar, el("span", {}, small ? "≈ 0" : number(Number(value.toPrecision(3))))];
    });
    return el("div", { className: "bars", role: "group", "aria-label": name }, ...rows);
  }

  // ---- forms ----

  const predict = `/v1/models/${data.model}:predict`;
  const infer = `/v2/models/${data.model}/infer`;

  function command(path, text) {
    const shell = el("pre", {});
    const update = (body) => {
      const data = body.length > 2000 ? "@request.json" : `'${body.replaceAll("'", "'\\''")}'`; // a file is shorter than a picture
      shell.textContent = `curl -d ${data} ${location.origin}${path}`;
    };
    update(text);
    return { shell: details("From the command line", shell), update };
  }

  function textForm(path, text, note) {
    const area = el("textarea", { id: "body", value: text, spellcheck: false });
    const send = el("button", { className: "main", type: "button" }, "Send");
    const line = command(path, text);
    send.addEventListener("click", async () => {
      send.disabled = true;
      line.update(area.value);
      await post(path, area.value);
      send.disabled = false;
    });
    place.replaceChildren(el("label", { for: "body" }, note), area,
      el("div", { className: "buttons" }, send), line.shell);
  }

  /** A field for each value of an instance; Send sends one instance. */
  function fieldsForm({ bare, fields, examples }) {
    const controls = fields.map((field, index) => control(field, `field-${index}`, bare));
    const instance = () => {
      if (bare) return controls[0].read();
      return Object.fromEntries(fields.map((field, index) => [field.name, controls[index].read()]));
    };
    let shown = 0;
    const fill = (example) => controls.forEach((one, index) => one.write(bare ? example : example[fields[index].name]));
    const send = el("button", { className: "main", type: "button" }, "Send");
    const another = el("button", { type: "button", hidden: examples.length < 2 }, "Next example");
    const asJson = el("button", { type: "button" }, "Edit as JSON");
    const line = command(predict, "…");
    const body = () => JSON.stringify({ instances: [instance()] });
    const guarded = (work) => async () => {
      try {
        await work();
      } catch (error) {
        answer.replaceChildren(el("p", { className: "error", role: "alert" }, error.message));
      }
    };
    send.addEventListener("click", guarded(async () => {
      const text = body();
      line.update(text);
      send.disabled = true;
      await post(predict, text, controls.map((one) => one.picture?.()).find(Boolean));
      send.disabled = false;
    }));
    another.addEventListener("click", () => { fill(examples[shown = (shown + 1) % examples.length]); });
    asJson.addEventListener("click", guarded(() => textForm(predict, body(), "Instances for the model's codec")));
    place.replaceChildren(el("div", { className: bare ? "fields bare" : "fields" }, ...controls.map((one) => one.element)),
      el("div", { className: "buttons" }, send, another, asJson), line.shell);
    if (examples.length) {
      fill(examples[0]);
      line.update(body());
    }
  }

  /** A labelled control for one value; an empty one is null where the examples have null, and for numbers. */
  function control({ name, kind, wrapped, nullable }, id, bare) {
    const title = name || { picture: "A picture for the model", number: "A number for the model" }[kind] || "A text for the model";
    const wrap = (element, label = el("label", { for: id }, title)) => el("div", { className: kind }, label, element);
    if (kind === "picture") return pictureControl(title, wrapped, id);
    if (kind === "boolean") {
      const choices = [["true", "yes"], ["false", "no"], ...(nullable ? [["null", "not known"]] : [])];
      const select = el("select", { id }, ...choices.map(([value, text]) => el("option", { value }, text)));
      return { element: wrap(select), read: () => JSON.parse(select.value), write: (value) => { select.value = String(value); } };
    }
    const input = kind === "lines" || kind === "json"
      ? el("textarea", { id, spellcheck: false, rows: bare ? 6 : 2 })
      : el("input", { id, type: kind, autocomplete: "off", ...(kind === "number" ? { step: "any" } : {}) });
    const read = () => {
      if (kind === "number" && input.validity.badInput) throw new Error(`${title}: not a number`);
      if (input.value === "" && (nullable || kind === "number")) return null;
      if (kind === "number") return Number(input.value);
      if (kind !== "json") return input.value;
      try {
        return JSON.parse(input.value);
      } catch {
        throw new Error(`${title}: not valid JSON`);
      }
    };
    const write = (value) => {
      input.value = value === null || value === undefined ? "" : kind === "json" ? JSON.stringify(value) : String(value);
    };
    return { element: wrap(input), read, write };
  }

  function pictureControl(title, wrapped, id) {
    let [base64, url] = ["", ""];
    const input = el("input", { id, type: "file", accept: "image/*" });
    const preview = el("img", { alt: `${title}: preview`, hidden: true });
    const hint = el("span", { className: "muted" }, "or drop a file here");
    const element = el("div", { className: "picture" }, el("label", { for: id }, title), preview, input, hint);
    const set = (text, address) => {
      [base64, url] = [text, address];
      preview.hidden = !url;
      if (url) preview.src = url;
    };
    const read = (file) => {
      if (!file) return;
      const reader = new FileReader();
      reader.addEventListener("load", () => set(reader.result.slice(reader.result.indexOf(",") + 1), file.type.startsWith("image/") ? reader.result : ""));
      reader.readAsDataURL(file);
    };
    input.addEventListener("change", () => read(input.files[0]));
    element.addEventListener("dragover", (event) => { event.preventDefault(); element.classList.add("over"); });
    element.addEventListener("dragleave", () => element.classList.remove("over"));
    element.addEventListener("drop", (event) => {
      event.preventDefault();
      element.classList.remove("over");
      read(event.dataTransfer.files[0]);
    });
    return {
      element,
      read: () => {
        if (!base64) throw new Error(`${title}: choose a picture first`);
        return wrapped ? { b64: base64 } : base64;
      },
      write: (value) => {
        const text = value?.b64 ?? value ?? "";
        set(text, pictureUrl(text));
      },
      picture: () => url,
    };
  }

  /** The form for a language model: a message if it has a chat template, else the beginning of a text. */
  function promptForm({ path, chat }) {
    const area = el("textarea", { id: "body", value: form.examples[0] || "", spellcheck: false });
    const send = el("button", { className: "main", type: "button" }, "Send");
    const body = () => JSON.stringify({
      model: data.model,
      max_tokens: form.max_tokens,
      ...(chat ? { messages: [{ role: "user", content: area.value }] } : { prompt: area.value }),
    });
    const line = command(path, body());
    send.addEventListener("click", async () => {
      send.disabled = true;
      line.update(body());
      await post(path, body());
      send.disabled = false;
    });
    place.replaceChildren(el("label", { for: "body" }, chat ? "A message for the model" : "The beginning of a text"), area,
      el("div", { className: "buttons" }, send), line.shell);
  }

  function tensorForm() {
    if (form.examples.length) {
      textForm(infer, JSON.stringify(form.examples[0]), "Tensors in the Open Inference Protocol; the example is a golden request");
      return;
    }
    const fill = el("select", { id: "fill" }, ...["zeros", "ones", "noise"].map((one) => el("option", {}, one)));
    const send = el("button", { className: "main", type: "button" }, "Send");
    send.addEventListener("click", async () => {
      send.disabled = true;
      await post(infer, JSON.stringify({ inputs: form.inputs.map((one) => filled(one, fill.value)) }));
      send.disabled = false;
    });
    place.replaceChildren(el("label", { for: "fill" }, "One instance, too large to show here, filled with"), fill,
      el("div", { className: "buttons" }, send));
  }

  /** A tensor of the signature; each free axis has size 1. */
  function filled(spec, kind) {
    const shape = spec.shape.map((axis) => (typeof axis === "number" ? axis : 1));
    const size = shape.reduce((product, axis) => product * axis, 1);
    const value = { BYTES: () => "", BOOL: () => kind !== "zeros" }[spec.datatype]
      || (() => (kind === "zeros" ? 0 : kind === "ones" ? 1 : spec.datatype.startsWith("FP") || spec.datatype === "BF16" ? Math.random() : Math.round(Math.random())));
    return { name: spec.name, datatype: spec.datatype, shape, data: Array.from({ length: size }, value) };
  }

  function drawingForm({ width, height, top, fit, pen }) {
    const side = 520;
    const pad = el("canvas", { className: "pad", width: side, height: Math.round((side * height) / width), role: "img",
      "aria-label": "Drawing area: draw with the mouse or a finger, or use an example" });
    const seen = el("canvas", { className: "seen", width, height, role: "img", "aria-label": "What the model sees" });
    const clear = el("button", { type: "button" }, "Clear");
    const example = el("button", { type: "button" }, "Example");
    const line = command(predict, "…");
    let strokes = [];
    let shown = -1;

    const brush = (canvas, thickness, points) => {
      const pencil = canvas.getContext("2d");
      pencil.lineCap = pencil.lineJoin = "round";
      pencil.lineWidth = thickness;
      for (const stroke of points) {
        pencil.beginPath();
        pencil.moveTo(...stroke[0]);
        for (const point of stroke) pencil.lineTo(...point);
        pencil.stroke();
      }
    };
    const paint = () => {
      const pencil = pad.getContext("2d");
      pencil.clearRect(0, 0, pad.width, pad.height);
      pencil.strokeStyle = getComputedStyle(pad).getPropertyValue("--ink");
      const thickness = ((fit ? 0.7 : 1) * pen * side) / width; // a fitted drawing is drawn again, with its own pen
      brush(pad, thickness, strokes.map((stroke) => stroke.map(([x, y]) => [(x * side) / width, (y * side) / width])));
    };
    /** Strokes in pixels of the picture, scaled to fill it if the model's samples do. */
    const fitted = () => {
      if (!fit) return strokes;
      const [xs, ys] = [0, 1].map((axis) => strokes.flat().map((point) => point[axis]));
      const [left, right, upper, lower] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
      const room = [width - pen, height - pen];
      const scale = Math.min(3, room[0] / (right - left || 1e-9), room[1] / (lower - upper || 1e-9));
      const middle = [(left + right) / 2, (upper + lower) / 2];
      return strokes.map((stroke) => stroke.map(([x, y]) =>
        [width / 2 + (x - middle[0]) * scale, height / 2 + (y - middle[1]) * scale]));
    };
    const picture = () => {
      const fine = 16; // points across one pixel
      const sheet = el("canvas", { width: width * fine, height: height * fine });
      brush(sheet, pen * fine, fitted().map((stroke) => stroke.map(([x, y]) => [x * fine, y * fine])));
      const ink = sheet.getContext("2d").getImageData(0, 0, sheet.width, sheet.height).data;
      return Array.from({ length: height }, (_, row) => Array.from({ length: width }, (_, column) => {
        let sum = 0;
        for (let y = row * fine; y < (row + 1) * fine; y++) {
          for (let x = column * fine; x < (column + 1) * fine; x++) sum += ink[4 * (y * sheet.width + x) + 3];
        }
        const grey = (sum / 255 / fine / fine) * top;
        return top > 4 ? Math.round(grey) : Number(grey.toFixed(3));
      }));
    };
    const preview = (pixels, canvas = seen) => {
      const pencil = canvas.getContext("2d");
      const [wide, high] = [canvas.width / width, canvas.height / height];
      pencil.clearRect(0, 0, canvas.width, canvas.height);
      pencil.fillStyle = getComputedStyle(canvas).getPropertyValue("--ink");
      pixels.forEach((row, y) => row.forEach((grey, x) => {
        pencil.globalAlpha = Math.min(1, grey / top);
        pencil.fillRect(x * wide, y * high, wide, high);
      }));
      pencil.globalAlpha = 1;
    };
    const send = (pixels) => {
      preview(pixels);
      const body = JSON.stringify({ instances: [pixels] });
      line.update(body);
      return post(predict, body);
    };

    const point = (event) => {
      const box = pad.getBoundingClientRect();
      return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
    };
    pad.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      pad.setPointerCapture(event.pointerId);
      if (shown >= 0) strokes = [];
      shown = -1;
      strokes.push([point(event)]);
      paint();
    });
    pad.addEventListener("pointermove", (event) => {
      if (!pad.hasPointerCapture(event.pointerId)) return;
      const coalesced = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
      for (const one of coalesced.length ? coalesced : [event]) strokes.at(-1).push(point(one));
      paint();
    });
    const lift = (event) => {
      if (pad.hasPointerCapture(event.pointerId)) pad.releasePointerCapture(event.pointerId);
    };
    pad.addEventListener("pointerup", lift);
    pad.addEventListener("pointercancel", lift);
    pad.addEventListener("lostpointercapture", () => { if (strokes.length) send(picture()); });
    clear.addEventListener("click", () => {
      strokes = [];
      latest++;
      paint();
      preview([]);
      answer.replaceChildren();
    });
    example.addEventListener("click", () => {
      shown = (shown + 1) % form.examples.length;
      strokes = [];
      preview(form.examples[shown], pad);
      send(form.examples[shown]);
    });
    example.hidden = form.examples.length === 0;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (strokes.length) paint(); });

    const figures = [
      el("figure", {}, pad, el("figcaption", {}, "draw here")),
      el("figure", {}, seen, el("figcaption", {}, `the model sees ${width} × ${height}`)),
    ];
    place.replaceChildren(el("div", { className: "draw" }, ...figures),
      el("div", { className: "buttons" }, clear, example), line.shell);
  }

  if (form.kind === "drawing") drawingForm(form.drawing);
  else if (form.kind === "text") promptForm(form);
  else if (form.kind === "fields") fieldsForm(form);
  else if (form.kind === "instances") {
    textForm(predict, JSON.stringify({ instances: form.examples.slice(0, 1) }), "Instances for the model's codec; edit the example");
  } else tensorForm();

  // ---- live ----

  const POLL = 2000;
  const WINDOW = 60_000;
  const KEPT = 120_000;
  const samples = [];
  const setLive = (key, text) => { document.getElementById(`live-${key}`).textContent = text; };

  async function poll() {
    if (!document.hidden) {
      try {
        const response = await fetch("/page.json");
        if (!response.ok) throw new Error(`${response.status}`);
        note(await response.json());
      } catch (error) {
        state("not reachable", "bad");
        setLive("note", `The service does not answer: ${error.message}`);
      }
    }
    setTimeout(poll, POLL);
  }

  function state(text, kind) {
    const pill = document.getElementById("state");
    pill.textContent = text;
    pill.className = `pill ${kind}`;
  }

  function note(counters) {
    const versions = counters.models.filter((one) => one.model === data.model);
    const now = performance.now();
    samples.push({ now, versions: new Map(versions.map((one) => [`${one.version} ${one.digest}`, one])) });
    while (samples.length > 2 && samples[1].now < now - KEPT) samples.shift();
    state(counters.ready ? "ready" : "not ready", counters.ready ? "good" : "bad");
    const current = versions.find((one) => one.current);
    const other = current && current.digest !== data.digest;
    setLive("note", other
      ? `Version ${current.version} with another bundle is active now: reload this page.`
      : "The last minute of this process, all versions together.");
    tiles(now, versions);
    spark(now);
  }

  /** Changes between two samples, summed over all versions; a new version starts from 0. */
  function between(from, to) {
    const sum = { requests: 0, failed: 0, batches: 0, rows: 0, seconds: [], bounds: [] };
    for (const [key, one] of to.versions) {
      const before = from.versions.get(key);
      for (const name of ["requests", "failed", "batches", "rows"]) sum[name] += one[name] - (before ? before[name] : 0);
      one.seconds.forEach((count, index) => {
        sum.seconds[index] = (sum.seconds[index] || 0) + count - (before && before.seconds[index] ? before.seconds[index] : 0);
      });
      if (one.bounds.length) sum.bounds = one.bounds;
    }
    return sum;
  }

  function tiles(now, versions) {
    const first = samples.find((one) => one.now >= now - WINDOW);
    const last = samples.at(-1);
    const past = between(first, last);
    const seconds = (last.now - first.now) / 1000;
    setLive("rate", seconds ? number(Number((past.requests / seconds).toPrecision(2))) : "–");
    setLive("p50", milliseconds(quantile(past, 0.5)));
    setLive("p99", milliseconds(quantile(past, 0.99)));
    setLive("failed", past.requests ? `${number(Number(((100 * past.failed) / past.requests).toPrecision(2)))} %` : "–");
    setLive("batch", past.batches ? number(Number((past.rows / past.batches).toPrecision(2))) : "–");
    setLive("waiting", number(versions.reduce((sum, one) => sum + one.waiting, 0)));
  }

  /** Interpolate a quantile, assuming that values are spread evenly within a bucket. */
  function quantile({ seconds, bounds }, share) {
    const all = seconds.reduce((sum, count) => sum + count, 0);
    let seen = 0;
    for (let index = 0; all && index < seconds.length; index++) {
      if (seen + seconds[index] >= share * all) {
        if (index === bounds.length) return Infinity;
        const low = index ? bounds[index - 1] : 0;
        return low + ((bounds[index] - low) * (share * all - seen)) / seconds[index];
      }
      seen += seconds[index];
    }
    return NaN;
  }

  const milliseconds = (seconds) =>
    Number.isNaN(seconds) ? "–" : seconds === Infinity ? "> 10 s" : `${number(Number((1000 * seconds).toPrecision(2)))} ms`;

  function spark(now) {
    const rates = samples.slice(1).map((one, index) => {
      const before = samples[index];
      return [one.now, (1000 * between(before, one).requests) / (one.now - before.now)];
    });
    if (rates.length < 2) return;
    const most = Math.max(1, ...rates.map(([, rate]) => rate));
    const line = rates.map(([at, rate]) => `${(100 + (100 * (at - now)) / KEPT).toFixed(2)},${(40 - (38 * rate) / most).toFixed(2)}`);
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 100 40");
    svg.setAttribute("preserveAspectRatio", "none");
    const draw = (kind, points) => {
      const shape = document.createElementNS(space, kind === "area" ? "polygon" : "polyline");
      shape.setAttribute("class", kind);
      shape.setAttribute("points", points.join(" "));
      svg.append(shape);
    };
    draw("area", [`${line[0].split(",")[0]},40`, ...line, `${line.at(-1).split(",")[0]},40`]);
    draw("edge", line);
    const box = document.getElementById("spark");
    box.replaceChildren(svg);
    box.setAttribute("aria-label", `Requests per second over the last two minutes, at most ${number(most)}`);
  }

  poll();
})();
