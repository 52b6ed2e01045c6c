"use strict";
// The text, token by token: what is pointed at, or reached by the arrow keys, is told beside it.
(() => {
  const told = JSON.parse(document.getElementById("tokens").textContent);
  const tokens = [...document.querySelectorAll("[data-token]")];
  const detail = document.getElementById("detail");
  let current = 0;

  const show = (text) => (text === "" ? "no text" : JSON.stringify(text));
  const rows = (t) => [
    ["token", `${show(t.text)}, id ${t.id}`],
    ["who", t.who],
    ["round", t.of ? `${t.round}, position ${t.position}: ${t.kept} of ${t.of} drafts kept` : `${t.round}`],
    ["drafted", t.drafted === null ? "nothing" : show(t.drafted)],
    ["wanted", show(t.text)],
    ["margin", t.margin === null ? "not told" : `${t.margin.toPrecision(3)} above the second choice`],
    ["so", t.why === "kept" ? "" : t.why],
  ];

  function tell(i) {
    const list = document.createElement("dl");
    for (const [name, value] of rows(told[i])) {
      if (!value) continue;
      list.append(document.createElement("dt"), document.createElement("dd"));
      list.children[list.children.length - 2].textContent = name;
      list.lastChild.textContent = value;
    }
    detail.replaceChildren(list);
    tokens.forEach((one, k) => one.classList.toggle("same", told[k].round === told[i].round));
  }

  function choose(i) {
    tokens[current].tabIndex = -1;
    tokens[current].setAttribute("aria-selected", "false");
    current = i;
    tokens[current].tabIndex = 0;
    tokens[current].setAttribute("aria-selected", "true");
    tokens[current].focus();
  }

  // From i on in that direction, the first token of another round.
  function otherRound(i, step) {
    let k = i;
    while (told[k + step] && told[k].round === told[i].round) k += step;
    while (told[k - 1] && told[k - 1].round === told[k].round) k -= 1;
    return k;
  }

  const moves = {
    ArrowRight: (i) => Math.min(i + 1, tokens.length - 1),
    ArrowLeft: (i) => Math.max(i - 1, 0),
    ArrowDown: (i) => otherRound(i, 1),
    ArrowUp: (i) => otherRound(i, -1),
    Home: () => 0,
    End: () => tokens.length - 1,
  };

  tokens.forEach((one, i) => {
    one.addEventListener("pointerenter", () => tell(i));
    one.addEventListener("focus", () => tell(i));
    one.addEventListener("click", () => choose(i));
    one.addEventListener("keydown", (event) => {
      if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      choose(moves[event.key](i));
    });
  });
  document.getElementById("rejected").addEventListener("change", (event) =>
    document.getElementById("text").classList.toggle("with-rejected", event.target.checked));
})();
